// SPDX-License-Identifier: Apache-2.0
// A device "fake" with two indices, in place of an accelerator. Each kernel is the CPU's, on memory
// of the device's own. Streams and events order nothing: they are logged.

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;

thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};

// Index of a device, with that of the current one for a device that names none.
DeviceIndex index_of(Device device) {
  TORCH_CHECK(device.index() < kDevices, "fake: invalid device ordinal ", int(device.index()));
  return device.has_index() ? device.index() : current_device;
}

// ---- the log

// What the log holds, in the order in which it happened. `log.py` has the same list.
enum Kind : int64_t {
  kRecord,       // an event (its version), recorded on a stream
  kWait,         // a stream waits for an event
  kRecordStream, // memory is in use on a stream
  kAllocate,     // memory, for the stream that is current
  kFree,         // memory, of the device's index
  kSynchronize,  // the host waits for a stream
  kSynchronizeEvent,
  kSynchronizeDevice,
};

using Entry = std::array<int64_t, 4>; // kind, event or address, index of the device, stream

std::mutex log_mutex;
std::vector<Entry> log_entries;
std::atomic<bool> logging{false};

int64_t log_length() {
  std::lock_guard<std::mutex> lock(log_mutex);
  return static_cast<int64_t>(log_entries.size());
}

void log_entry(Kind kind, int64_t what, DeviceIndex device, c10::StreamId stream) {
  if (!logging) return;
  std::lock_guard<std::mutex> lock(log_mutex);
  log_entries.push_back({kind, what, device, stream});
}

// ---- devices, streams, events

struct FakeEvent {
  int64_t version = 0; // of the last record, unique among all events
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = kFake;

  c10::DeviceType type() const override { return kFake; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return Device(kFake, current_device); }
  void setDevice(Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }

  static Stream stream(Device device, c10::StreamId id) {
    return Stream(Stream::UNSAFE, Device(kFake, index_of(device)), id);
  }
  Stream getStream(Device device) const override {
    return stream(device, current_streams[index_of(device)]);
  }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> made{0};
    return stream(device, ++made);
  }
  Stream exchangeStream(Stream next) const override {
    Stream before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override {
    log_entry(kSynchronize, 0, stream.device_index(), stream.id());
  }
  void synchronizeDevice(DeviceIndex device) const override {
    log_entry(kSynchronizeDevice, 0, device, 0);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    log_entry(
        kRecordStream, reinterpret_cast<int64_t>(memory.get()), stream.device_index(), stream.id());
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    static std::atomic<int64_t> records{0};
    if (*event == nullptr) *event = new FakeEvent;
    auto& recorded = *static_cast<FakeEvent*>(*event);
    recorded = {++records, std::chrono::steady_clock::now()};
    log_entry(kRecord, recorded.version, stream.device_index(), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return; // never recorded: nothing to wait for
    log_entry(
        kWait, static_cast<FakeEvent*>(event)->version, stream.device_index(), stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      log_entry(kSynchronizeEvent, static_cast<FakeEvent*>(event)->version, 0, 0);
    }
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    auto time = static_cast<FakeEvent*>(second)->time - static_cast<FakeEvent*>(first)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<FakeEvent*>(event);
  }
};

// ---- memory

std::atomic<int64_t> allocated_bytes{0};

// What a block of memory is freed by: its address, size and device.
struct Block {
  void* memory;
  int64_t bytes;
  DeviceIndex device;

  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    log_entry(kFree, reinterpret_cast<int64_t>(block->memory), block->device, 0);
    allocated_bytes -= block->bytes;
    std::free(block->memory);
    delete block;
  }
};

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(kFake, current_device);
    if (bytes == 0) return {nullptr, device};
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK(memory != nullptr, "fake: out of memory, ", bytes, " bytes asked for");
    allocated_bytes += static_cast<int64_t>(bytes);
    log_entry(
        kAllocate, reinterpret_cast<int64_t>(memory), current_device,
        current_streams[current_device]);
    auto* block = new Block{memory, static_cast<int64_t>(bytes), current_device};
    return {memory, block, &Block::free, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceMemory device_memory;

// Pinned memory of the host. All of it is known by its address.
struct PinnedMemory final : c10::Allocator {
  static std::mutex mutex;
  static std::set<const void*> blocks;

  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::lock_guard<std::mutex> lock(mutex);
    blocks.insert(memory);
    return {memory, memory, &PinnedMemory::free, Device(c10::kCPU)};
  }
  static void free(void* memory) {
    std::lock_guard<std::mutex> lock(mutex);
    blocks.erase(memory);
    std::free(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

std::mutex PinnedMemory::mutex;
std::set<const void*> PinnedMemory::blocks;
PinnedMemory pinned_memory;

// ---- random numbers

// The CPU's generator, of a device.
struct FakeGenerator final : at::CPUGeneratorImpl {
  explicit FakeGenerator(DeviceIndex device) {
    device_ = Device(kFake, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  FakeGenerator* clone_impl() const override {
    auto* clone = new FakeGenerator(device_.index());
    clone->set_state(*get_state());
    return clone;
  }
};

const at::Generator& default_generator(DeviceIndex device) {
  static std::array<at::Generator, kDevices> generators{
      at::make_generator<FakeGenerator>(0), at::make_generator<FakeGenerator>(1)};
  return generators[index_of(Device(kFake, device))];
}

// Lets the CPU's kernels draw from a generator of the device, by exchanging states.
class DrawsFrom {
 public:
  explicit DrawsFrom(at::Generator generator)
      : cpu_(at::detail::getDefaultCPUGenerator()), fake_(std::move(generator)) {
    exchange();
  }
  ~DrawsFrom() { exchange(); }

 private:
  void exchange() {
    auto of_cpu = cpu_.get_state();
    cpu_.set_state(fake_.get_state());
    fake_.set_state(of_cpu);
  }
  at::Generator cpu_, fake_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { exchangeDevice(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(kFake, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<FakeGenerator>(index_of(Device(kFake, device)));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(PinnedMemory::mutex);
    return PinnedMemory::blocks.count(data) > 0;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = device_memory.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) {
      std::memcpy(memory.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---- tensors

std::atomic<bool> has_float64{true};

c10::ScalarType checked(std::optional<c10::ScalarType> type) {
  auto given = c10::dtype_or_default(type);
  // The error of Macs' MPS, by type and text.
  TORCH_CHECK_TYPE(
      has_float64 || (given != c10::kDouble && given != c10::kComplexDouble),
      "Cannot convert a fake Tensor to float64 dtype as the fake framework doesn't support float64."
      " Please use float32 instead.");
  return given;
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(kFake)));
  return at::detail::empty_generic(size, &device_memory, kKeys, checked(type), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> type,
    std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kFake)));
  return at::detail::empty_strided_generic(size, stride, &device_memory, kKeys, checked(type));
}

// The same memory, as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  if (tensor.device().type() != kFake) return tensor;
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  auto keeps = [tensor](void*) {};
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), keeps, options);
}

// Whether this thread is in a kernel of the CPU: what that copies is memory of the device's own.
thread_local int kernels = 0;

struct InKernel {
  InKernel() { ++kernels; }
  ~InKernel() { --kernels; }
};

// A copy that blocks has the host wait for the stream.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  on_host(to).copy_(on_host(from));
  if (from.device().type() != to.device().type() && !non_blocking && kernels == 0) {
    auto stream = Guard().getStream((from.device().type() == kFake ? from : to).device());
    Guard().synchronizeStream(stream);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

c10::Scalar local_scalar_dense(const Tensor& tensor) {
  Guard().synchronizeStream(Guard().getStream(tensor.device()));
  return at::_local_scalar_dense(on_host(tensor));
}

void record_stream(Tensor& tensor, Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

// Holds an operation to one device, as kernels of accelerators are: of the CPU they take single
// numbers, and indices.
class OneDevice {
 public:
  explicit OneDevice(const c10::OperatorHandle& op)
      : name_(op.schema().name()), indexes_(name_.rfind("aten::index", 0) == 0) {}

  void check(const Tensor& tensor, bool in_list) {
    if (!tensor.defined()) return;
    bool on_cpu = tensor.device().is_cpu();
    if (on_cpu && (tensor.dim() == 0 || (indexes_ && in_list))) return;
    if (!device_) device_ = tensor.device();
    TORCH_CHECK(
        *device_ == tensor.device(), "Expected all tensors to be on the same device, but found at"
        " least two devices, ", *device_, " and ", tensor.device(), "! (in ", name_, ")");
  }

 private:
  std::string name_;
  bool indexes_;
  std::optional<Device> device_;
};

// Any operation, by the CPU's kernel.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  OneDevice one_device(op);
  std::optional<at::Generator> generator;
  std::optional<DeviceIndex> device;
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  for (size_t k = 0; k < arguments.size(); ++k) {
    auto& argument = (*stack)[stack->size() - arguments.size() + k];
    auto see = [&](const Tensor& tensor, bool in_list) {
      one_device.check(tensor, in_list);
      if (tensor.defined() && tensor.device().type() == kFake) device = tensor.device().index();
    };
    if (argument.isTensor()) {
      see(argument.toTensor(), false);
    } else if (argument.isTensorList()) {
      for (const Tensor& tensor : argument.toTensorVector()) see(tensor, true);
    } else if (argument.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : argument.toOptionalTensorVector()) {
        if (tensor) see(*tensor, true);
      }
    } else if (argument.isGenerator() && argument.toGenerator().device().type() == kFake) {
      generator = argument.toGenerator();
      argument = c10::IValue();
    }
  }
  InKernel in_kernel;
  constexpr bool views_are_errors = true;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    DrawsFrom draws(generator ? *generator : default_generator(device.value_or(-1)));
    at::native::cpu_fallback(op, stack, views_are_errors);
  } else {
    at::native::cpu_fallback(op, stack, views_are_errors);
  }
}

// An operation under autocast: its floating-point arguments become float32, or the lower type.
template <bool lower>
void autocast(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  auto type = lower ? at::autocast::get_autocast_dtype(kFake) : at::kFloat;
  size_t first = stack->size() - op.schema().arguments().size();
  for (auto argument = stack->begin() + first; argument != stack->end(); ++argument) {
    if (argument->isTensor()) {
      *argument = at::autocast::cached_cast(type, argument->toTensor(), kFake);
    }
  }
  op.callBoxed(stack);
}

// ---- collectives

// A collective, over when it returns, but on a stream of its own: what comes after waits for that
// as it does for NCCL's.
class Collective final : public c10d::Work {
 public:
  Collective(std::vector<Tensor> results, Stream stream)
      : device_(stream.device()), results_(std::move(results)), over_(kFake) {
    over_.record(stream);
    std::vector<Device> devices{device_};
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    c10::StreamGuard guard(stream);
    future_->markCompleted(results_);
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::vector<Tensor> result() override { return results_; }
  void synchronize() override { over_.block(Guard().getStream(device_)); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Device device_;
  std::vector<Tensor> results_;
  c10::Event over_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The stream of a group's collectives on a device.
Stream stream_of(const void* group, Device device) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, DeviceIndex>, c10::StreamId> streams;
  std::lock_guard<std::mutex> lock(mutex);
  auto [found, is_new] = streams.try_emplace({group, device.index()});
  if (is_new) found->second = Guard().getNewStream(device, 0).id();
  return Guard::stream(device, found->second);
}

// Of this thread: the stream of its last collective, and how long the log was when it ran.
thread_local std::vector<int64_t> last_collective{0, 0};

// Puts the host's view in the place of every tensor of the device, in lists too.
void move_to_host(c10::IValue& value, std::vector<Tensor>& seen) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kFake) {
    seen.push_back(value.toTensor());
    value = on_host(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<Tensor> tensors = value.toTensorVector();
    for (Tensor& tensor : tensors) {
      c10::IValue one(tensor);
      move_to_host(one, seen);
      tensor = one.toTensor();
    }
    value = tensors;
  } else if (value.isList()) {
    auto list = value.toList().copy();
    for (size_t k = 0; k < list.size(); ++k) {
      c10::IValue one = list.get(k);
      move_to_host(one, seen);
      list.set(k, one);
    }
    value = list;
  }
}

// A collective on memory of the device, by the backend that the group has for the CPU: Gloo.
void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto first = stack->end() - schema.arguments().size();
  std::vector<Tensor> tensors, results;
  const void* group = nullptr;
  for (auto argument = first; argument != stack->end(); ++argument) {
    if (argument->isObject() && schema.arguments()[argument - first].name() == "process_group") {
      group = argument->toObjectRef().getSlot(0).toCapsule().get();
    }
    move_to_host(*argument, tensors);
    if (argument == first) results = tensors;
  }
  Device device = tensors.at(0).device();
  Stream stream = stream_of(group, device);
  c10::Event before(kFake);
  before.record(Guard().getStream(device));
  before.block(stream);
  for (const Tensor& tensor : tensors) {
    Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  last_collective = {stream.id(), log_length()};
  c10::IValue& work = stack->back();
  work.toCustomClass<c10d::Work>()->wait();
  c10::intrusive_ptr<c10d::Work> done =
      c10::make_intrusive<Collective>(std::move(results), stream);
  work = done;
}

// torch's kernels for these look for a backend of the device, and there is none.
const auto collectives = [] {
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {} // that kernels are replaced
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto name : {"_allgather_base_", "_reduce_scatter_base_", "allgather_",
                    "allgather_coalesced_", "allgather_into_tensor_coalesced_", "allreduce_",
                    "allreduce_coalesced_", "alltoall_", "alltoall_base_", "broadcast_", "gather_",
                    "recv_", "reduce_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_",
                    "scatter_", "send"}) {
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
  }
  return library;
}();

// ---- what Python asks for

Tensor get_log(int64_t start) {
  std::lock_guard<std::mutex> lock(log_mutex);
  auto rows = static_cast<int64_t>(log_entries.size()) - start;
  auto log = at::empty({rows, std::tuple_size_v<Entry>}, at::kLong);
  if (rows > 0) std::memcpy(log.data_ptr(), log_entries.data() + start, rows * sizeof(Entry));
  return log;
}

void set_logging(bool on) {
  std::lock_guard<std::mutex> lock(log_mutex);
  if (on) log_entries.clear();
  logging = on;
}

Hooks hooks;
[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

} // namespace

namespace at::detail {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  namespace native = at::native;
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  // Else their `.out` would be given a single number, which the CPU resizes with a warning.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  // Views, and what changes a tensor but not its memory.
  m.impl("as_strided", &native::as_strided_tensorimpl);
  m.impl("view", [](const Tensor& t, c10::IntArrayRef size) { return native::view(t, size); });
  m.impl("_reshape_alias", [](const Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return native::_reshape_alias(t, size, stride);
  });
  m.impl("unfold", &native::unfold);
  m.impl("view_as_real", &native::view_as_real);
  m.impl("view_as_complex", &native::view_as_complex);
  m.impl(
      "resize_",
      [](const Tensor& t, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format)
          -> const Tensor& {
        c10::DeviceGuard guard(t.device());
        return native::resize_(t, size, format);
      });
  m.impl("set_.source_Storage", &native::set_);
  m.impl("set_.source_Storage_storage_offset", &native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &native::set_tensor_);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto name : {"addmm", "bmm", "conv1d", "conv2d", "linear", "matmul", "mm",
                    "scaled_dot_product_attention"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<true>>());
  }
  for (auto name : {"binary_cross_entropy_with_logits", "cross_entropy_loss", "exp", "layer_norm",
                    "log", "mse_loss", "nll_loss", "smooth_l1_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<false>>());
  }
}

TORCH_LIBRARY(fake_device, m) {
  m.def("log(int start) -> Tensor", &get_log);
  m.def("log_length() -> int", &log_length);
  m.def("set_logging(bool on) -> ()", &set_logging);
  m.def("set_float64(bool on) -> ()", [](bool on) { has_float64 = on; });
  m.def("allocated_bytes() -> int", []() -> int64_t { return allocated_bytes; });
  m.def("current_stream(int device) -> int", [](int64_t device) -> int64_t {
    return current_streams[index_of(Device(kFake, device))];
  });
  m.def("last_collective() -> int[]", [] { return last_collective; });
  m.def("rng_state(int device) -> Tensor", [](int64_t device) {
    return default_generator(device).get_state();
  });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const Tensor& state) {
    at::Generator generator = default_generator(device);
    generator.set_state(state);
  });
  m.def("manual_seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    at::Generator generator = default_generator(device);
    generator.set_current_seed(seed);
  });
}
