# SPDX-License-Identifier: Apache-2.0
"""Optuna's storages: a journal file, a database, or Optuna's gRPC proxy of either."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from noisescale.extras import need
from noisescale.refusal import Refusal

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

T = TypeVar("T")

GRACE = 30
"""Seconds after which the lock of a journal counts as left behind by a process that has ended."""

GRPC = "grpc://"


def open_storage(place: str, *, new: bool = False) -> BaseStorage:
    """Open a storage.

    A journal has the lock of a file that is created exclusively, which works on NFS from version 3
    on. Optuna's default lock is a symbolic link, which is never released if its holder has ended
    and the path is relative.

    Args:
        place: The path of a journal file, the URL of a database, or `grpc://host:port`.
        new: Whether a journal is created if there is none.

    Raises:
        ValueError: If the storage cannot be opened.
    """
    need("optuna", "A sweep")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("sqlalchemy").setLevel(logging.ERROR)
    if place.startswith(GRPC):
        return _proxy(place)
    if "://" in place:
        return _database(place)
    return _journal(Path(place), new)


def without_password(place: str) -> str:
    """Return the place of a storage for messages, without a password.

    Examples:
        >>> without_password("mysql://me:secret@host/db"), without_password("sweep.journal")
        ('mysql://host/db', 'sweep.journal')
    """
    scheme, between, rest = place.partition("://")
    return f"{scheme}{between}{rest.rpartition('@')[2]}" if between else place


def retry(call: Callable[[], T], seconds: float = 60.0) -> T:
    """Call a function that uses a storage. While the storage is out of reach, try again.

    Args:
        call: The function. It may run more than once.
        seconds: For this long.

    Raises:
        ValueError: If the storage is still out of reach.
    """
    started, wait = time.monotonic(), 0.5
    while True:
        try:
            return call()
        except Exception as error:  # of a driver that is not imported here
            if not _is_of_storage(error):
                raise
            if time.monotonic() - started > seconds:
                raise Refusal(
                    "storage",
                    "be within reach",
                    f"{type(error).__name__}: {str(error)[:200]}",
                    "Finished trainings are kept. Start the same command again when it is.",
                ) from error
        time.sleep(wait)
        wait = min(2 * wait, 5.0)


def _is_of_storage(error: Exception) -> bool:
    from optuna.exceptions import StorageInternalError

    grpc_error = type(error).__module__.startswith("grpc")
    return isinstance(error, (StorageInternalError, OSError)) or grpc_error


def _journal(path: Path, new: bool) -> BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    path = path.absolute()
    if path.is_dir():
        raise Refusal(
            "storage",
            "be a file",
            f"the folder {path}",
            "Name a file in it, for example sweep.journal.",
        )
    if not path.exists() and not new:
        raise Refusal(
            "storage",
            "exist",
            f"{path}, which does not",
            "Check the path, or start the sweep with `noisescale sweep`.",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = JournalFileOpenLock(str(path), GRACE)
        if path.exists():
            _mend(path, lock)
            _check_first_line(path)

        class Backend(JournalFileBackend):
            def append_logs(self, logs: list[dict[str, Any]]) -> None:
                # A line that was cut off when the disk was full would take the next one with it.
                _mend(path, lock)
                super().append_logs(logs)

        return JournalStorage(Backend(str(path), lock))
    except OSError as error:
        raise Refusal(
            "storage",
            "be a file that can be written",
            f"{path}: {error.strerror}",
            "Name another file.",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(
            "storage",
            "be a journal of Optuna",
            f"{path}, which cannot be read: {error}",
            "Name another file.",
        ) from error


def _mend(path: Path, lock: object) -> None:
    """Cut off a last line that was never finished: its disk was full, or its machine stopped."""
    from optuna.storages.journal._file import get_lock_file

    def torn() -> bool:
        if not path.exists():
            return False
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"

    if not torn():
        return
    with get_lock_file(lock):  # type: ignore[arg-type]  # one of Optuna's
        if torn():  # and nobody is writing
            content = path.read_bytes()
            os.truncate(path, content.rfind(b"\n") + 1)


def _check_first_line(path: Path) -> None:
    """Raise a ValueError if a file has something else than the operations of a journal."""
    with path.open("rb") as file:
        first = file.readline()
    if first and "op_code" not in json.loads(first):
        raise ValueError("its first line is no operation")


def _database(url: str) -> BaseStorage:
    from optuna.storages import get_storage

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of SQLAlchemy about Optuna
            return get_storage(url)
    except Exception as error:  # of SQLAlchemy, of a driver, or of Optuna
        raise Refusal(
            "storage",
            "be a database within reach",
            f"{without_password(url)}: {type(error).__name__}: {str(error)[:200]}",
            "Check the URL, and whether its driver is installed (postgresql+psycopg://"
            " needs psycopg, mysql+pymysql:// PyMySQL).",
        ) from error


def _proxy(place: str) -> BaseStorage:
    from optuna.storages import GrpcStorageProxy

    host, _, port = place.removeprefix(GRPC).rpartition(":")
    if not host or not port.isdigit():
        raise Refusal(
            "storage",
            "have a host and a port",
            place,
            "Write, for example, grpc://host:13000.",
        )
    need("grpc", "A storage behind gRPC")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is experimental
        storage = GrpcStorageProxy(host=host, port=int(port))
    try:
        storage.wait_server_ready(timeout=10)
    except Exception as error:  # of gRPC, which is not imported here
        raise Refusal(
            "storage",
            "be a gRPC proxy of Optuna within reach",
            f"{place} without an answer",
            "Start it with `optuna.storages.run_grpc_proxy_server`.",
        ) from error
    return storage
