"""SGLang's arguments and environment variables that change the meaning of a page's bytes, by name:
all of them are fields of the model fingerprint.

Everything else changes no byte, or only the name of a page, or rounding. The policy on rounding: a
page is reused across kernels, batch sizes and numbers of expert-parallel ranks, as SGLang reuses
its own pages, since all of them compute the same numbers up to rounding. Whatever decides in which
precision weights, activations, index keys or states are held, which of them are omitted, or in
which order they lie, is a field. Where that was not certain, it is a field too: that costs a miss,
never a wrong answer. `tests/runtime/fingerprint_table.py` lists the others of SGLang 0.5.23, each
with its reason.
"""

from __future__ import annotations

from typing import Final

ARGUMENTS: Final = (
    "revision", "dtype", "quantization", "kv_cache_dtype", "json_model_override_args",
    "load_format", "speculative_algorithm",
    # which model code runs, and on which configuration of it
    "trust_remote_code", "model_impl", "model_config_parser", "is_embedding", "enable_multimodal",
    "language_only", "language_model_only", "dllm_algorithm", "dllm_fdfo", "forward_hooks",
    "debug_tensor_dump_input_file",
    "context_length",  # some models scale their rotary embedding by it
    # where weights come from, and how they are quantized
    "model_loader_extra_config", "custom_weight_loader",
    "remote_instance_weight_loader_seed_instance_ip",
    "remote_instance_weight_loader_seed_instance_service_port", "modelexpress_config",
    "modelopt_quant", "quantize_and_serve", "kt_method", "kt_num_gpu_experts",
    "kt_max_deferred_experts_per_token",
    # the precision of computing and of what is sent between ranks
    "enable_tf32_matmul", "prefill_kv_cache_dequant_dtype", "flashinfer_mxfp4_moe_precision",
    "deepep_dispatcher_output_dtype", "flashinfer_a2a_dispatch_type", "enable_w4a4_mxfp4_megamoe",
    "enable_quant_communications", "enable_deterministic_inference", "rl_on_policy_target",
    # the order and format of device pages
    "enable_page_major_kv_layout", "enable_unified_memory", "c128_page_size",
    "enable_encoder_swa_bounded_replay", "enable_decoder_swa_bounded_replay",
    # index keys and sparse attention
    "qsa_indexer_dtype", "dsa_prefill_backend", "dsa_decode_backend", "enable_dsa_fused_indexer",
    "enable_deepseek_v4_fp4_indexer", "enable_hisparse", "hisparse_config",
    # states of linear layers
    "mamba_ssm_dtype", "mamba_radix_cache_strategy", "enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds", "enable_int8_mamba_checkpoint", "enable_linear_replayssm",
    "linear_replayssm_cache_len", "enable_linear_replayssm_spec",
    # a rank's share of a page
    "enable_prefill_cp", "cp_strategy", "enable_cp_decode_attn_tp", "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding",
    # pages of a draft model
    "speculative_draft_model_revision", "speculative_draft_load_format",
    "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype",
    "speculative_draft_attention_backend", "speculative_draft_window_size",
    "speculative_draft_sink_size", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "enable_multi_layer_eagle", "speculative_dflash_block_size",
    "speculative_dspark_block_size", "speculative_enable_w4a4_mxfp4_megamoe",
    # which tensors of an adapter are applied
    "lora_target_modules", "experts_shared_outer_loras", "lora_strict_loading",
    # images, which may be identified by the bytes that a client sent, not by those computed on
    "mm_process_config", "image_processor_backend", "disable_fast_image_processor",
    "trust_mm_content_hashes", "enable_precise_embedding_interpolation",
)  # fmt: skip
"""Arguments that are fields of the fingerprint if they have a value."""

PATHS: Final = (
    "speculative_draft_model_path",
    "quantization_param_path",
    "rl_quant_profile",
    "kt_weight_path",
    "uno_lora_path",
    "decrypted_config_file",
    "decrypted_draft_config_file",
    "modelopt_checkpoint_restore_path",
    "dllm_algorithm_config",
)
"""Arguments that name a file or folder whose contents are part of the fingerprint."""

PATH_VARIABLES: Final = ("SGLANG_EXPERT_PACK_PATH",)
"""Environment variables that name such a file or folder."""

VARIABLES: Final = (
    # the order and format of device pages
    "SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT", "SGLANG_USE_FIA_NZ",
    "ASCEND_USE_FIA",
    "SGLANG_NPU_USE_MLAPO", "SGLANG_NPU_USE_SCATTER_PA_KV_CACHE",
    "SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD", "SGLANG_DSV4_KV_LAYOUT",
    "SGLANG_DSV4_COMPRESSED_KV_LAYOUT", "SGLANG_DSV4_UNIFIED_KV_FP8",
    "SGLANG_DSV4_COMPRESS_STATE_DTYPE", "SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE",
    "SGLANG_OPT_USE_ONLINE_COMPRESS", "SGLANG_EXPERIMENTAL_ONLINE_C128_MTP",
    "SGLANG_OPT_SM120_DIRECT_SWA_KV", "SGLANG_OPT_INKLING_MXFP8_FUSED_QUANT_STORE",
    # index keys: their order, their precision, and whether they are rotated
    "SGLANG_DSA_HIP_DISABLE_PRESHUFFLE", "SGLANG_DISABLE_DSA_INDEXER_FUSION",
    "SGLANG_DISABLE_AITER_FUSED_FP8_DSA_INDEXER", "SGLANG_HIP_FP4_INDEXER_ROWGROUP",
    "SGLANG_HIP_DSV4_C4_INDEXER_ROWGROUP", "SGLANG_HIP_DSV41_INDEX_K_PAGE8",
    "SGLANG_OPT_MINIMAX_M3_FP8_INDEX_CACHE",
    # which positions are attended
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ",
    "SGLANG_DISABLE_MSA", "SGLANG_OPT_USE_MINIMAX_DENSE_SPARSE_DECODE",
    "SGLANG_MINICPM_FORCE_DENSE", "SGLANG_MINICPM_DENSE_AS_SPARSE",
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",
    "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR",
    # states of linear layers
    "SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE",
    # (SGLANG_PP_LAYER_PARTITION, a rank's layers, is a field of its own)
    # which model code runs
    "SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_EXTERNAL_MM_MODEL_ARCH",
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", "SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_USE_MODELSCOPE",
    "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION", "SGLANG_ROPE_CACHE_FP32",
    "SGLANG_MLX_USE_CUSTOM_ROPE", "SGLANG_DEBUG_REVERT_PR",
    # how weights are quantized when they are loaded
    "SGLANG_INT4_WEIGHT", "SGLANG_CPU_QUANTIZATION", "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN",
    "SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE", "SGLANG_GLM_NEXTN_MOE_PTPC",
    "SGLANG_QUANT_ALLOW_DOWNCASTING", "SGLANG_FORCE_MXFP8_BLOCK_CONVERT_DENSE",
    "SGLANG_FORCE_MXFP8_BLOCK_CONVERT", "SGLANG_FP8_IGNORED_LAYERS", "SGLANG_FP4_IGNORED_LAYERS",
    "SGLANG_HUMMING_ONLINE_QUANT_CONFIG", "SGLANG_HUMMING_INPUT_QUANT_CONFIG",
    "SGLANG_NPU_ARCH35_REQUANT_BLOCK_FP8", "SGLANG_NPU_W4A4_NEW_PACKING", "SGLANG_DSV4_FP4_EXPERTS",
    "SGLANG_DSV4_FP4_DEQUANT", "SGLANG_DSV4_DENSE_MXSCALE", "SGLANG_DSV4_DENSE_MXSCALE_SHAPES",
    "SGLANG_ROCM_DISABLE_LINEARQUANT", "SGLANG_ROCM_SMALLM_FP8_PROJ", "SGLANG_OPT_FP8_WO_A_GEMM",
    "SGLANG_HIP_WO_A_MXFP8",
    # the precision of computing and of what is sent between ranks
    "SGLANG_HUMMING_USE_F16_ACCUM", "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16", "SGLANG_MOE_NVFP4_DISPATCH",
    "SGLANG_DEEPEP_BF16_DISPATCH", "SGLANG_NIXL_EP_BF16_DISPATCH", "SGLANG_MORI_DISPATCH_DTYPE",
    "SGLANG_MORI_COMBINE_DTYPE", "DEEP_NORMAL_MODE_USE_INT8_QUANT",
    "SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE", "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION",
    "SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16", "FLASHINFER_NVFP4_4OVER6",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", "SGLANG_USE_SAGE_ATTENTION_IMPL",
    "SGLANG_TRITON_FP8_PREFILL_ATTN", "SGLANG_AITER_FP8_PREFILL_ATTN",
    "SGLANG_ENABLE_DP_GATHER_FP8",
    "SGLANG_AMD_FLYDSL_MEGA_QUANT", "SGLANG_USE_AITER_FP8_PER_TOKEN", "SGLANG_GFX1250_W4A8_BACKEND",
    "SGLANG_GFX1250_W4A8_MOE", "AITER_FORCE_A8W4", "AITER_SITUV2_A4W4", "AITER_SITUV2_A8W4",
    "SGLANG_AITER_K3_OPT", "ROCM_QUICK_REDUCE_QUANTIZATION", "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "SGLANG_OPT_HIP_FLYDSL_MXFP8", "SGLANG_HIP_SHARED_ACT_MXFP8", "SGLANG_HIP_FFN_NORM_MXFP8",
    "SGLANG_NPU_MOE_SITU_MXFP8_FUSED", "SGLANG_ENABLE_DSA_Q8KV8_BORN_FP8_Q",
    "SGLANG_DISABLE_M3_FP8_ATTN_GEMM", "SGLANG_DISABLE_MSA_V1_Q8KV4",
    "SGLANG_OPT_USE_MINIMAX_FP8_Q_EPILOGUE", "SGLANG_MINIMAX_M3_FUSED_SWIGLU_MXFP8",
    "SGLANG_OPT_DSV41_BF16_INDEX_LOGITS", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
    # pages of a draft model
    "SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX", "SGLANG_DSPARK_DEFER_CONTEXT_KV",
    "SGLANG_DSPARK_STACKED_CTX_KV",
    # images and videos, which may be identified by the bytes that a client sent
    "SGLANG_IMAGE_MAX_PIXELS", "SGLANG_RESIZE_RESAMPLE", "SGLANG_FORCE_CPU_IMAGE_PREPROCESSING",
    "SGLANG_ENCODER_IMAGE_PROCESSOR_USE_GPU", "SGLANG_INKLING_RS_MM_PREPROCESS", "VIDEO_MAX_PIXELS",
    "XHS_VIDEO_JPEG_QUALITY",
    # debugging switches that change what is computed
    "SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD", "SGLANG_SIMULATE_ACC_TOKEN_MODE",
    "SGLANG_SIMULATE_ACC_GREEDY", "SGLANG_SIMULATE_UNIFORM_EXPERTS",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS", "SGLANG_DEBUG_HISPARSE_SKIP_IO", "BIAS_PREP_ONLY",
    "SGLANG_KV_CANARY_PERTURB_REQ_TO_TOKEN_PROB", "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS",
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB",
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_UNUSED_CACHE_PROB",
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_POST_FORWARD_PROB", "SGLANG_KV_CANARY_PERTURB_TARGET_GROUP",
    "SGLANG_KV_CANARY_PERTURB_NEXT_TOKEN_SWAP_PROB",
)  # fmt: skip
"""Environment variables that are fields of the fingerprint if their value is not SGLang's
default.
"""
