# SPDX-License-Identifier: Apache-2.0
"""Tiny models of Hugging Face's transformers: the class of each, its batches and configuration."""
# ruff: noqa: C408 - options are written as the classes of configurations take them

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.accuracy._neutral_training import (
    LENGTH,
    ROWS,
    TOKENS,
    NotThere,
    Training,
    classes,
    images,
    points,
    tokens,
)

_LIKE_BERT = dict(
    vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=64, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
_LIKE_LLAMA = dict(_LIKE_BERT, num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=2)
_LIKE_GPT = dict(
    vocab_size=TOKENS, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
_EXPERTS = dict(
    _LIKE_LLAMA, num_local_experts=4, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32,
)  # fmt: skip
_LIKE_BART = dict(
    vocab_size=TOKENS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    forced_eos_token_id=2,
)  # fmt: skip
_LIKE_T5 = dict(
    vocab_size=TOKENS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, pad_token_id=0,
    eos_token_id=1, decoder_start_token_id=0,
)  # fmt: skip
_LIKE_VIT = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32,
    patch_size=8, num_labels=5,
)  # fmt: skip
_IN_STAGES = dict(
    hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], num_labels=5, image_size=64, embed_dim=16,
)  # fmt: skip
_LIKE_WAV2VEC2 = dict(
    _LIKE_BERT, vocab_size=20, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8),
    num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
    ctc_loss_reduction="mean", mask_time_prob=0.1, mask_time_length=2,
)  # fmt: skip
_LIKE_SERIES = dict(
    prediction_length=4, context_length=12, lags_sequence=[1, 2], d_model=16, encoder_layers=1,
    decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, num_time_features=1,
    encoder_attention_heads=2, decoder_attention_heads=2,
)  # fmt: skip
_TEXT_AND_VISION = dict(
    text_config=dict(_LIKE_LLAMA, projection_dim=16), vision_config=dict(_LIKE_VIT),
    projection_dim=16,
)  # fmt: skip

TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Decoders.
    "GPT-2": ("GPT2LMHeadModel", "tokens", _LIKE_GPT),
    "GPT": ("OpenAIGPTLMHeadModel", "tokens", _LIKE_GPT),
    "GPT-J": ("GPTJForCausalLM", "tokens", dict(_LIKE_GPT, rotary_dim=8)),
    "GPT-Neo": (
        "GPTNeoForCausalLM", "tokens",
        dict(_LIKE_BERT, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]),
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "tokens", _LIKE_BERT),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", "tokens", _LIKE_GPT),
    "CodeGen": ("CodeGenForCausalLM", "tokens", dict(_LIKE_GPT, rotary_dim=8, n_head=4)),
    "CTRL": ("CTRLLMHeadModel", "tokens", dict(_LIKE_GPT, dff=64)),
    "ImageGPT": (
        "ImageGPTForCausalImageModeling", "tokens", dict(_LIKE_GPT, vocab_size=TOKENS + 1),
    ),
    "Llama": ("LlamaForCausalLM", "tokens", _LIKE_LLAMA),
    "Mistral": ("MistralForCausalLM", "tokens", dict(_LIKE_LLAMA, sliding_window=8)),
    "Mixtral": ("MixtralForCausalLM", "tokens", dict(_EXPERTS, output_router_logits=True)),
    "Qwen2": ("Qwen2ForCausalLM", "tokens", _LIKE_LLAMA),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", "tokens", _EXPERTS),
    "Qwen3": ("Qwen3ForCausalLM", "tokens", _LIKE_LLAMA),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "tokens", _EXPERTS),
    "Gemma": ("GemmaForCausalLM", "tokens", _LIKE_LLAMA),
    "Gemma 2": ("Gemma2ForCausalLM", "tokens", _LIKE_LLAMA),
    "Gemma 3": ("Gemma3ForCausalLM", "tokens", _LIKE_LLAMA),
    "Phi": ("PhiForCausalLM", "tokens", _LIKE_LLAMA),
    "Phi-3": ("Phi3ForCausalLM", "tokens", _LIKE_LLAMA),
    "PhiMoE": ("PhimoeForCausalLM", "tokens", _EXPERTS),
    "OPT": (
        "OPTForCausalLM", "tokens", dict(_LIKE_LLAMA, ffn_dim=64, word_embed_proj_dim=32),
    ),
    "Bloom": ("BloomForCausalLM", "tokens", dict(_LIKE_GPT, n_layer=2, hidden_size=32)),
    "Falcon": ("FalconForCausalLM", "tokens", _LIKE_BERT),
    "MPT": ("MptForCausalLM", "tokens", dict(vocab_size=TOKENS, d_model=32, n_heads=2, n_layers=2)),
    "StableLM": ("StableLmForCausalLM", "tokens", _LIKE_LLAMA),
    "Cohere": ("CohereForCausalLM", "tokens", _LIKE_LLAMA),
    "OLMo 2": ("Olmo2ForCausalLM", "tokens", _LIKE_LLAMA),
    "Granite-MoE": ("GraniteMoeForCausalLM", "tokens", _EXPERTS),
    "gpt-oss": ("GptOssForCausalLM", "tokens", _EXPERTS),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM", "tokens",
        dict(
            _EXPERTS, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
            kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
            num_key_value_heads=2, head_dim=8,
        ),
    ),
    "Starcoder2": ("Starcoder2ForCausalLM", "tokens", _LIKE_LLAMA),
    "Nemotron": ("NemotronForCausalLM", "tokens", _LIKE_LLAMA),
    "Persimmon": ("PersimmonForCausalLM", "tokens", _LIKE_LLAMA),
    "DiffLlama": ("DiffLlamaForCausalLM", "tokens", _LIKE_LLAMA),
    "GLM": ("GlmForCausalLM", "tokens", _LIKE_LLAMA),
    "XGLM": (
        "XGLMForCausalLM", "tokens",
        dict(_LIKE_LLAMA, d_model=32, num_layers=2, attention_heads=2, ffn_dim=64),
    ),
    "BioGPT": ("BioGptForCausalLM", "tokens", _LIKE_BERT),
    "ModernBERT, decoder": ("ModernBertDecoderForCausalLM", "tokens", _LIKE_BERT),
    "Mamba": (
        "MambaForCausalLM", "tokens",
        dict(vocab_size=TOKENS, hidden_size=32, state_size=4, num_hidden_layers=2),
    ),
    "Mamba 2": (
        "Mamba2ForCausalLM", "tokens",
        dict(
            vocab_size=TOKENS, hidden_size=32, state_size=4, num_hidden_layers=2, num_heads=4,
            head_dim=16, n_groups=1, chunk_size=8,
        ),
    ),
    "Falcon-Mamba": (
        "FalconMambaForCausalLM", "tokens",
        dict(vocab_size=TOKENS, hidden_size=32, state_size=4, num_hidden_layers=2),
    ),
    "Jamba": (
        "JambaForCausalLM", "tokens",
        dict(
            _EXPERTS, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1,
            mamba_d_state=4, mamba_dt_rank=4,
        ),
    ),
    "RWKV": (
        "RwkvForCausalLM", "tokens",
        dict(vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, context_length=64),
    ),
    "RecurrentGemma": (
        "RecurrentGemmaForCausalLM", "tokens", dict(_LIKE_LLAMA, num_hidden_layers=3, lru_width=32),
    ),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM", "tokens",
        dict(
            _EXPERTS, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
            shared_expert_intermediate_size=32,
        ),
    ),
    "LFM2": (
        "Lfm2ForCausalLM", "tokens", dict(_LIKE_LLAMA, layer_types=["conv", "full_attention"]),
    ),
    "xLSTM": (
        "xLSTMForCausalLM", "tokens",
        dict(vocab_size=TOKENS, hidden_size=32, num_blocks=2, num_heads=2, chunk_size=16,
             use_cache=False),
    ),
    "Reformer": (
        "ReformerModelWithLMHead", "tokens",
        dict(
            vocab_size=TOKENS, hidden_size=32, num_attention_heads=2, attention_head_size=16,
            feed_forward_size=64, attn_layers=["local", "lsh"], axial_pos_shape=[4, 4],
            axial_pos_embds_dim=[16, 16], local_attn_chunk_length=4, lsh_attn_chunk_length=4,
            num_buckets=4, num_hashes=1, is_decoder=True, max_position_embeddings=64,
        ),
    ),
    # Encoders.
    "BERT": ("BertForMaskedLM", "tokens", _LIKE_BERT),
    "RoBERTa": ("RobertaForMaskedLM", "tokens", _LIKE_BERT),
    "ALBERT": ("AlbertForMaskedLM", "tokens", dict(_LIKE_BERT, embedding_size=16)),
    "ELECTRA": ("ElectraForMaskedLM", "tokens", dict(_LIKE_BERT, embedding_size=16)),
    "DistilBERT": (
        "DistilBertForMaskedLM", "tokens",
        dict(_LIKE_BERT, dim=32, hidden_dim=64, n_layers=2, n_heads=2),
    ),
    "DeBERTa": (
        "DebertaForMaskedLM", "tokens",
        dict(_LIKE_BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    ),
    "DeBERTa-v2": (
        "DebertaV2ForMaskedLM", "tokens",
        dict(
            _LIKE_BERT, relative_attention=True, pos_att_type=["c2p", "p2c"], conv_kernel_size=3,
            share_att_key=True, position_buckets=8, norm_rel_ebd="layer_norm",
        ),
    ),
    "XLNet": (
        "XLNetLMHeadModel", "tokens",
        dict(vocab_size=TOKENS, d_model=32, n_layer=2, n_head=2, d_inner=64),
    ),
    "Longformer": ("LongformerForMaskedLM", "tokens", dict(_LIKE_BERT, attention_window=8)),
    "BigBird": (
        "BigBirdForMaskedLM", "long tokens",
        dict(_LIKE_BERT, block_size=4, num_random_blocks=2, max_position_embeddings=128),
    ),
    "Funnel": (
        "FunnelForMaskedLM", "tokens",
        dict(vocab_size=TOKENS, block_sizes=[1, 1], d_model=32, n_head=2, d_head=16, d_inner=64),
    ),
    "MobileBERT": (
        "MobileBertForMaskedLM", "tokens",
        dict(_LIKE_BERT, embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32),
    ),
    "MPNet": ("MPNetForMaskedLM", "tokens", _LIKE_BERT),
    "SqueezeBERT": ("SqueezeBertForMaskedLM", "tokens", dict(_LIKE_BERT, embedding_size=32)),
    "ConvBERT": ("ConvBertForMaskedLM", "tokens", dict(_LIKE_BERT, embedding_size=32)),
    "FNet": ("FNetForMaskedLM", "tokens", _LIKE_BERT),
    "Nyströmformer": (
        "NystromformerForMaskedLM", "tokens",
        dict(_LIKE_BERT, num_landmarks=4, segment_means_seq_len=LENGTH),
    ),
    "YOSO": ("YosoForMaskedLM", "tokens", _LIKE_BERT),
    "I-BERT": ("IBertForMaskedLM", "tokens", dict(_LIKE_BERT, quant_mode=True)),
    "RoFormer": ("RoFormerForMaskedLM", "tokens", _LIKE_BERT),
    "ModernBERT": ("ModernBertForMaskedLM", "tokens", _LIKE_BERT),
    "ESM": (
        "EsmForMaskedLM", "tokens",
        dict(_LIKE_BERT, mask_token_id=3, position_embedding_type="rotary"),
    ),
    "Perceiver": (
        "PerceiverForMaskedLM", "tokens",
        dict(
            vocab_size=TOKENS, num_latents=4, d_latents=32, d_model=32, num_blocks=1,
            num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2,
            max_position_embeddings=LENGTH, qk_channels=32, v_channels=32,
        ),
    ),
    "CANINE": (
        "CanineForSequenceClassification", "text",
        dict(_LIKE_BERT, num_labels=5, downsampling_rate=2, local_transformer_stride=8),
    ),
    # Encoders with decoders.
    "T5": ("T5ForConditionalGeneration", "tokens", _LIKE_T5),
    "mT5": ("MT5ForConditionalGeneration", "tokens", _LIKE_T5),
    "LongT5": (
        "LongT5ForConditionalGeneration", "tokens",
        dict(
            _LIKE_T5, encoder_attention_type="transient-global", local_radius=3,
            global_block_size=4,
        ),
    ),
    "Switch Transformers": (
        "SwitchTransformersForConditionalGeneration", "tokens",
        dict(_LIKE_T5, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    ),
    "BART": ("BartForConditionalGeneration", "tokens", dict(_LIKE_BART, decoder_layerdrop=0.3)),
    "mBART": ("MBartForConditionalGeneration", "tokens", _LIKE_BART),
    "Pegasus": ("PegasusForConditionalGeneration", "tokens", _LIKE_BART),
    "Marian": ("MarianMTModel", "tokens", _LIKE_BART),
    "Blenderbot": ("BlenderbotForConditionalGeneration", "tokens", _LIKE_BART),
    "M2M100": ("M2M100ForConditionalGeneration", "tokens", _LIKE_BART),
    "LED": (
        "LEDForConditionalGeneration", "tokens",
        dict(_LIKE_BART, attention_window=8, max_encoder_position_embeddings=64,
             max_decoder_position_embeddings=64),
    ),
    "BigBird-Pegasus": (
        "BigBirdPegasusForConditionalGeneration", "long tokens",
        dict(_LIKE_BART, block_size=4, num_random_blocks=2, max_position_embeddings=128),
    ),
    "ProphetNet": (
        "ProphetNetForConditionalGeneration", "tokens",
        dict(
            vocab_size=TOKENS, hidden_size=32, num_encoder_layers=1, num_decoder_layers=1,
            num_encoder_attention_heads=2, num_decoder_attention_heads=2, encoder_ffn_dim=64,
            decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=0,
        ),
    ),
    # Vision.
    "ViT": ("ViTForImageClassification", "images", _LIKE_VIT),
    "DeiT": ("DeiTForImageClassification", "images", _LIKE_VIT),
    "BEiT": (
        "BeitForImageClassification", "images", dict(_LIKE_VIT, use_relative_position_bias=True),
    ),
    "DINOv2": ("Dinov2ForImageClassification", "images", dict(_LIKE_VIT, drop_path_rate=0.1)),
    "ViT-MAE": (
        "ViTMAEForPreTraining", "images alone",
        dict(
            _LIKE_VIT, decoder_hidden_size=32, decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2, decoder_intermediate_size=64,
        ),
    ),
    "Swin": (
        "SwinForImageClassification", "large images",
        dict(
            image_size=64, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 2],
            window_size=4, num_labels=5,
        ),
    ),
    "Swin v2": (
        "Swinv2ForImageClassification", "large images",
        dict(
            image_size=64, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 2],
            window_size=4, num_labels=5,
        ),
    ),
    "ConvNeXt": ("ConvNextForImageClassification", "large images", _IN_STAGES),
    "ConvNeXt V2": ("ConvNextV2ForImageClassification", "large images", _IN_STAGES),
    "ResNet": (
        "ResNetForImageClassification", "large images", dict(_IN_STAGES, embedding_size=16),
    ),
    "RegNet": (
        "RegNetForImageClassification", "large images",
        dict(_IN_STAGES, embedding_size=16, groups_width=16),
    ),
    "BiT": (
        "BitForImageClassification", "large images",
        dict(_IN_STAGES, embedding_size=32, num_groups=4, hidden_sizes=[32, 32, 64, 64]),
    ),
    "SegFormer": (
        "SegformerForSemanticSegmentation", "masks",
        dict(
            depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 2, 2],
            decoder_hidden_size=32, num_labels=5,
        ),
    ),
    "PVT": (
        "PvtForImageClassification", "large images",
        dict(
            image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_labels=5,
            num_attention_heads=[1, 2, 2, 2],
        ),
    ),
    "PoolFormer": (
        "PoolFormerForImageClassification", "large images",
        dict(depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_labels=5),
    ),
    "MobileNet V2": (
        "MobileNetV2ForImageClassification", "large images",
        dict(num_labels=5, depth_multiplier=0.35, image_size=64),
    ),
    "MobileViT": (
        "MobileViTForImageClassification", "large images",
        dict(
            num_labels=5, image_size=64, hidden_sizes=[16, 24, 32],
            neck_hidden_sizes=[8, 16, 16, 24, 24, 32, 64],
        ),
    ),
    "FocalNet": (
        "FocalNetForImageClassification", "large images",
        dict(
            image_size=64, embed_dim=16, hidden_sizes=[16, 32], depths=[1, 1], focal_levels=[2, 2],
            focal_windows=[3, 3], num_labels=5,
        ),
    ),
    "Hiera": (
        "HieraForImageClassification", "large images",
        dict(
            image_size=[64, 64], embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 2],
            num_labels=5,
        ),
    ),
    "CvT": (
        "CvtForImageClassification", "large images",
        dict(embed_dim=[16, 16, 32], num_heads=[1, 2, 2], depth=[1, 2, 3], num_labels=5),
    ),
    "DETR": (
        "DetrForObjectDetection", "boxes",
        dict(
            d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=5,
            num_labels=5, use_timm_backbone=False, use_pretrained_backbone=False,
        ),
    ),
    "YOLOS": (
        "YolosForObjectDetection", "boxes",
        dict(_LIKE_VIT, image_size=[64, 64], num_detection_tokens=5),
    ),
    "VideoMAE": (
        "VideoMAEForVideoClassification", "videos", dict(_LIKE_VIT, num_frames=4, tubelet_size=2),
    ),
    # Audio.
    "Whisper": (
        "WhisperForConditionalGeneration", "spectra",
        dict(
            _LIKE_BART, num_mel_bins=8, max_source_positions=32, max_target_positions=32,
            suppress_tokens=None, begin_suppress_tokens=None,
        ),
    ),
    "Speech2Text": (
        "Speech2TextForConditionalGeneration", "long spectra",
        dict(
            _LIKE_BART, input_feat_per_channel=8, conv_channels=16, max_source_positions=64,
            max_target_positions=32,
        ),
    ),
    "Wav2Vec2": ("Wav2Vec2ForCTC", "waves", _LIKE_WAV2VEC2),
    "HuBERT": ("HubertForCTC", "waves", _LIKE_WAV2VEC2),
    "WavLM": ("WavLMForCTC", "waves", _LIKE_WAV2VEC2),
    "UniSpeech-SAT": ("UniSpeechSatForCTC", "waves", _LIKE_WAV2VEC2),
    "Wav2Vec2-Conformer": ("Wav2Vec2ConformerForCTC", "waves", _LIKE_WAV2VEC2),
    "SEW": ("SEWForCTC", "waves", dict(_LIKE_WAV2VEC2, squeeze_factor=2)),
    "SEW-D": ("SEWDForCTC", "waves", dict(_LIKE_WAV2VEC2, squeeze_factor=2)),
    "Data2VecAudio": ("Data2VecAudioForCTC", "waves", dict(_LIKE_WAV2VEC2, conv_pos_kernel_size=3)),
    "AST": (
        "ASTForAudioClassification", "spectrograms",
        dict(_LIKE_VIT, max_length=32, num_mel_bins=16, patch_size=8, frequency_stride=8,
             time_stride=8),
    ),
    # Several modalities.
    "CLIP": ("CLIPModel", "captions", _TEXT_AND_VISION),
    "SigLIP": ("SiglipModel", "captions", _TEXT_AND_VISION),
    "BLIP": (
        "BlipForConditionalGeneration", "captions to write",
        dict(
            text_config=dict(_LIKE_BERT, encoder_hidden_size=32, bos_token_id=1, sep_token_id=2),
            vision_config=_LIKE_VIT, projection_dim=16,
        ),
    ),
    "GIT": (
        "GitForCausalLM", "captions to write",
        dict(_LIKE_LLAMA, vision_config=_LIKE_VIT),
    ),
    "ViLT": (
        "ViltForQuestionAnswering", "questions", dict(_LIKE_VIT, **{**_LIKE_BERT, "num_labels": 5}),
    ),
    "LayoutLM": ("LayoutLMForMaskedLM", "tokens", _LIKE_BERT),
    "LLaVA": (
        "LlavaForConditionalGeneration", "chats",
        dict(
            text_config=dict(_LIKE_LLAMA, model_type="llama"), image_token_index=5,
            vision_config=dict(_LIKE_VIT, model_type="clip_vision_model"), image_seq_length=16,
        ),
    ),
    # Series of numbers.
    "PatchTST": (
        "PatchTSTForPrediction", "series",
        dict(
            num_input_channels=2, context_length=16, patch_length=4, patch_stride=4,
            prediction_length=4, d_model=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
        ),
    ),
    "PatchTSMixer": (
        "PatchTSMixerForPrediction", "series",
        dict(
            num_input_channels=2, context_length=16, patch_length=4, patch_stride=4,
            prediction_length=4, d_model=16, num_layers=2,
        ),
    ),
    "Time Series Transformer": (
        "TimeSeriesTransformerForPrediction", "series in time", _LIKE_SERIES,
    ),
    "Informer": ("InformerForPrediction", "series in time", _LIKE_SERIES),
    "Autoformer": (
        "AutoformerForPrediction", "series in time", dict(_LIKE_SERIES, moving_average=3),
    ),
}  # fmt: skip


def _batch_of(kind: str, g: torch.Generator) -> dict[str, Any]:
    """A batch for a model of transformers."""
    words, numbers = tokens(g), classes(g)
    if kind == "tokens":
        return {"input_ids": words, "labels": words}
    if kind == "long tokens":
        long = tokens(g, 4, 96)
        return {"input_ids": long, "labels": long}
    if kind == "text":
        return {"input_ids": words, "labels": numbers}
    if kind in ("images", "large images"):
        return {"pixel_values": images(g, 32 if kind == "images" else 64), "labels": numbers}
    if kind == "images alone":
        return {"pixel_values": images(g)}
    if kind == "masks":
        labels = torch.randint(5, (ROWS, 64, 64), generator=g)
        return {"pixel_values": images(g, 64), "labels": labels}
    if kind == "boxes":
        boxes = [
            {
                "class_labels": torch.randint(5, (2,), generator=g),
                "boxes": 0.25 + 0.5 * torch.rand(2, 4, generator=g),
            }
            for _ in range(ROWS)
        ]
        return {"pixel_values": images(g, 64), "labels": boxes}
    if kind == "videos":
        return {"pixel_values": points(g, 4, 3, 32, 32), "labels": numbers}
    if kind == "spectra":
        return {"input_features": points(g, 8, 64), "labels": words}
    if kind == "long spectra":
        return {"input_features": points(g, 64, 8), "labels": words}
    if kind == "spectrograms":
        return {"input_values": points(g, 32, 16), "labels": numbers}
    if kind == "waves":
        labels = torch.randint(1, 20, (ROWS, 4), generator=g)
        return {"input_values": points(g, 800), "labels": labels}
    if kind == "captions":
        return {"input_ids": words, "pixel_values": images(g), "return_loss": True}
    if kind == "captions to write":
        return {"input_ids": words, "pixel_values": images(g), "labels": words}
    if kind == "questions":
        answers = F.one_hot(numbers, 5).float()
        return {"input_ids": words, "pixel_values": images(g), "labels": answers}
    if kind == "chats":
        said = torch.randint(6, TOKENS, (ROWS, LENGTH), generator=g)
        chat = torch.cat([torch.full((ROWS, 16), 5), said], 1)
        return {"input_ids": chat, "pixel_values": images(g), "labels": chat}
    if kind == "series":
        return {"past_values": points(g, 16, 2), "future_values": points(g, 4, 2)}
    assert kind == "series in time", kind
    past = {"past_values": points(g, 14), "past_time_features": points(g, 14, 1)}
    future = {"future_values": points(g, 4), "future_time_features": points(g, 4, 1)}
    return past | future | {"past_observed_mask": torch.ones(ROWS, 14)}


def of_transformers(name: str, variant: str) -> Training:
    transformers = import_module("transformers")
    class_name, kind, options = TRANSFORMERS[name]
    of = getattr(transformers, class_name)
    if name == "DETR":
        backbone = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 16, 16, 32], depths=[1, 1, 1, 1],
            out_features=["stage4"], layer_type="basic",
        )  # fmt: skip
        options = options | {"backbone_config": backbone}
    model = of(of.config_class(**options))
    if variant:
        if not model.supports_gradient_checkpointing:
            raise NotThere
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    rows = 4 if kind == "long tokens" else ROWS
    return Training(model, lambda batch: model(**batch).loss, partial(_batch_of, kind), rows)
