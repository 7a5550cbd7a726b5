"""Every argument and environment variable of SGLang 0.5.23 that the fingerprint of a page does not
have as a field: in which other way it is told apart, or why it changes no byte of a page.

With another release `test_fingerprint_table.py` names what is new. Find out what it does. If it
changes what the bytes of a page mean, or if that is not certain, add it to
`sgl_kvtier/runtime/backend/fingerprint_fields.py`; otherwise add it here, below its reason.
"""

from __future__ import annotations

DIGESTED = """model_path lora_paths"""
"""Arguments of which the identity has the digest of the files they name."""

SEED = """random_seed"""
"""A field with random weights only (--load-format dummy)."""

OF_RANKS = """tp_size pp_size attn_cp_size dcp_size"""
"""A field by way of `RankShare`, as SGLang tells a storage backend."""

OF_POOLS = """page_size hicache_mem_layout disable_hybrid_swa_memory"""
"""A field by way of the shapes of host pools (`PageShape`), which follow from it."""

ARGUMENTS_OF_NAMES = """
tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init chat_template
trust_request_chat_template hf_chat_template_name completion_template
default_chat_template_kwargs allow_auto_truncate strip_thinking_cache
enable_strict_thinking tool_server enable_session_radix_cache
"""
"""Change which tokens a request has, and with them the names of its pages."""

ARGUMENTS_WITHOUT_EFFECT = {
    "Loads the same weights another way or from another place: the digest is of what was read.": """
        weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        startup_weight_load_mode remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine
        engine_info_bootstrap_port download_dir model_checksum delete_ckpt_after_loading
        weight_cache_mode weight_cache_socket weight_cache_timeout
    """,
    "Writes a copy of the weights; the server computes with the same ones.": """
        modelopt_checkpoint_save_path modelopt_export_path
    """,
    "Weights that come after the start end the use of stored pages: `weights_changed`.": """
        checkpoint_engine_wait_weights_before_ready
    """,
    "Of the output layer, of sampling or of what a request returns, which no page holds.": """
        enable_fp32_lm_head enable_custom_logit_processor enable_watermark watermark_config
        watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
        watermark_max_probability watermark_default_enabled watermark_enforce_all
        enable_return_hidden_states return_hidden_states_mode
        enable_return_aux_hidden_states aux_hidden_state_capture
        return_aux_hidden_state_layer_ids enable_return_routed_experts
        enable_return_indexer_topk sampling_mask_max_tokens disable_outlines_disk_cache
        sampling_backend grammar_backend enable_mis enable_dp_lm_head
        enable_tp_lm_head_all_to_all mlx_enable_sampling
    """,
    "Which kernel computes: the same numbers up to rounding.": """
        attention_backend decode_attention_backend prefill_attention_backend
        enable_lean_attention enable_nvidia_megakernel enable_amd_monokernel
        fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend
        dsv4_prefill_backend dsa_triton_union dsv4_attn_backend dsa_paged_mqa_logits_backend
        dsa_topk_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops
        triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size flashinfer_mla_disable_ragged
        enable_fused_qk_norm_rope mamba_backend linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
        enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs
        enable_scattered_sconv moe_runner_backend mm_attention_backend
        speculative_attention_mode speculative_dsa_topk_backend
        speculative_moe_runner_backend lora_backend max_lora_chunk_size
        lora_use_virtual_experts device
    """,
    "How ranks of a layer share its computing, and by which way they sum: rounding.": """
        enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp
        enable_torch_symm_mem pre_warm_nccl boundary_reduction
        enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
        disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode
        enable_fused_moe_sum_all_reduce moe_a2a_backend deepep_v2_mode deepep_mode
        fuseep_mode deepep_config disable_flashinfer_cutlass_moe_fp4_allgather
        disable_shared_experts_fusion enforce_shared_experts_fusion
        speculative_moe_a2a_backend speculative_boundary_reduction
    """,
    "Where experts lie, and how often: each token goes to the same ones.": """
        ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb
        eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size expert_balancedness_report_mode
        elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device enable_waterfill
        ep_join_mode elastic_ep_scale_timeout enable_paged_experts
        paged_experts_num_resident kt_cpuinfer kt_threadpool_count
    """,
    "Where weights, embeddings or batches lie while they are used, and in which order.": """
        enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
        enable_two_batch_overlap enable_single_batch_overlap
        tbo_token_distribution_threshold cpu_offload_gb offload_group_size
        offload_num_in_group offload_prefetch_step offload_mode ple_offload_embedding
        ple_offload_backend ple_offload_dir
    """,
    "How many states are kept, and at which positions: each has the name of its page.": """
        mamba_max_states_per_path uses_mamba_radix_cache mamba_track_interval
        int8_mamba_ckpt_size
    """,
    "HTTP, gRPC, keys, names and the form of answers.": """
        tokenizer_worker_num detokenizer_worker_num host port fastapi_root_path
        smg_grpc_mode grpc_mode grpc_port grpc_worker_threads sidecar sidecar_args
        skip_server_warmup warmups enable_http2 http2_max_concurrent_streams
        http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs
        ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name
        weight_version file_storage_path enable_cache_report return_input_ids
        return_output_ids reasoning_parser tool_call_parser sampling_defaults
        asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params
        stream_interval batch_notify_size stream_response_default_include_usage
        incremental_streaming_output enable_streaming_session
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_tokenizer_batch_encode disable_tokenizer_batch_decode enable_response_store
        grpc_response_timeout_secs enable_http_worker_reuseport
    """,
    "Which requests run when, and how much room there is: the same tokens have the "
    "same pages, up to rounding.": """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens
        chunked_prefill_size prefill_decode_interval enable_dynamic_chunking
        max_prefill_tokens prefill_max_requests schedule_policy enable_priority_scheduling
        disable_priority_preemption default_priority_value abort_on_priority_when_disabled
        schedule_low_priority_values_first priority_scheduling_preemption_threshold
        retraction_policy schedule_conservativeness swa_full_tokens_ratio
        prefill_only_disable_kv_cache disable_chunked_prefix_cache disable_overlap_schedule
        num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk
        max_mamba_cache_size mamba_full_memory_ratio enable_prefill_delayer
        prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
        prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay
        _swa_full_tokens_ratio_explicitly_set swa_prefix_tails
        prefill_decode_interval_min_bs
    """,
    "Which pages are kept, in which tier, and when they move; not what they hold.": """
        radix_eviction_policy radix_eviction_policy_config disable_radix_cache
        radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode hicache_ratio
        hicache_size hicache_write_policy hicache_io_backend hicache_storage_backend
        hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker
        unified_cache_external_linker_backend enable_lmcache lmcache_config_file
        enable_flexkv flexkv_config_file _radix_eviction_policy_explicitly_set
        hicache_host_memory_fraction enable_linker_mla_dedup
        unified_cache_external_linker_config
    """,
    "How many ranks divide what is not in a page (experts, dense layers, requests), "
    "and how they meet. Of how many ranks hold a page's parts, `RankShare` tells.": """
        nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank
        pp_max_micro_batch_size pp_async_batch_depth dp_size attn_dp_size
        load_balance_method moe_dp_size dwdp_size dcp_comm_backend dcp_replicate_q_proj
        enable_dp_attention enable_dp_attention_local_control_broadcast
        enable_attn_tp_input_scattered enable_shared_experts_attn_tp shared_experts_tp_size
        enable_dense_mlp_attn_tp enable_layernorm_sp disable_attn_tp_gather enable_p2p_check
        ep_size moe_dense_tp_size ep_join_rank_offset elastic_ep_initial_size max_ep_size
        enable_cp_tp_group_sharing enable_megamoe_for_layernorm_sp
    """,
    "On which device, node or process a rank runs, and what watches it.": """
        base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray
        numa_node gc_threshold
    """,
    "Logs, metrics, traces and checks.": """
        custom_sigquit_handler log_level log_level_http log_requests log_requests_level
        log_requests_format log_requests_target uvicorn_access_log_exclude_prefixes
        crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port
        enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
        tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
        extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency
        bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
        gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
        kv_events_config load_publish_endpoint enable_forward_pass_metrics
        forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace
        trace_modules otlp_traces_endpoint export_metrics_to_file export_metrics_to_file_dir
        stat_loggers kv_canary kv_canary_real_data kv_canary_sweep_interval
        debug_tensor_dump_output_folder debug_tensor_dump_layers msprobe_dump_config
        otlp_service_name
    """,
    "CUDA graphs, their sizes and what watches them: the same kernels.": """
        cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill
        cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode
        cuda_graph_bs_prefill cuda_graph_prefill_max_context disable_prefill_cuda_graph
        disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
        enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
        enable_layerwise_nvtx_marker cuda_graph_max_seq_len_prefill
    """,
    "Which tokens a draft proposes and how many are accepted: the pages of those "
    "that are do not depend on it.": """
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier
        speculative_accept_threshold_single speculative_accept_threshold_acc
        speculative_use_rejection_sampling speculative_token_map
        _speculative_draft_quantization_explicitly_set speculative_adaptive
        speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth
        speculative_ngram_max_bfs_breadth speculative_ngram_match_type
        speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens speculative_domino_candidate_pool_size
        speculative_use_block_verification
    """,
    "Between which servers pages and pictures travel; their bytes are the same on both sides.": """
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
        decoupled_spec_role disaggregation_mode disaggregation_transfer_backend
        disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup
        num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval optimistic_prefill_attempts encoder_only
        encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder enable_pdmux pdmux_config_path sm_group_num
        disaggregation_enable_kv_checksum enable_pd_role_switch
        disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy
    """,
    "Where and by how many workers pictures are read and kept before they are computed on.": """
        enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder
        mm_processor_worker_num mm_io_worker_num allowed_media_domains
        media_url_max_file_size_mb mm_preprocess_cache_size_mb limit_mm_data_per_request
        enable_mm_global_cache mm_global_cache_backend mm_feature_transport
    """,
    "How many adapters are held, and how they are loaded and scheduled; an adapter's "
    "digest, and its name in the page's, tell its pages.": """
        enable_lora enable_lora_overlap_loading max_lora_rank max_loaded_loras
        max_loras_per_batch lora_eviction_policy lora_drain_wait_threshold
    """,
}
"""Change no byte of a page, by reason."""

VARIABLES_WITHOUT_EFFECT = {
    "How processes are told apart and set up.": """
        SGLANG_ROLE_NAMESPACES SGLANG_ROLE_NAMESPACES_OUT IS_H200
        SGLANG_ENABLE_TORCH_INFERENCE_MODE SGLANG_SET_CPU_AFFINITY SGLANG_NUMA_BIND_V2
        SGLANG_AUTO_NUMA_BIND SGLANG_CRASH_ON_NUMA_BIND_FAILURE CUDA_DEVICE_ORDER
        CUDA_VISIBLE_DEVICES CU_NUM DEVICE_ID HOSTNAME HOST_IP LOCAL_HOSTNAME LOCAL_RANK
        LOCAL_SIZE MASTER_ADDR MS_NODE_ID MS_ROLE MS_SCHED_HOST MS_SCHED_PORT MS_WORKER_NUM
        RANK SGLANG_BLOCK_NONZERO_RANK_CHILDREN SGLANG_CPU_OMP_THREADS_BIND SGLANG_DP_RANK
        SGLANG_HOST_IP SGLANG_LOCAL_IP_NIC SGLANG_RUN_ID SGLANG_USE_CPU_ENGINE WORLD_SIZE
        ZE_AFFINITY_MASK ZE_ENABLE_PCI_ID_DEVICE_ORDER
    """,
    "Loads the same weights another way or faster.": """
        SGLANG_SORT_WEIGHT_FILES SGLANG_USE_ATTN_TP_NGRAM SGLANG_ENABLE_QWEN4_PLE_FUSION
        SGLANG_QWEN4_PLE_FILE_DIR SGLANG_QWEN4_PLE_FILE_PREFETCH
        SGLANG_QWEN4_PLE_FILE_SKIP_DEVICE_CHECK SGLANG_QWEN4_PLE_FILE_RSS_BUDGET_GB
        SGLANG_QWEN4_PLE_FILE_RSS_INTERVAL_S SGLANG_PREFETCH_BLOCK_SIZE_MB
        SGLANG_ENABLE_WEIGHT_LOADER_V2 SGLANG_MOE_COPY_WEIGHT_VIEWS_BEFORE_H2D
        SGLANG_LOAD_SNAPSHOT_USE_ZMQ SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN
        HF_HUB_DISABLE_XET SGLANG_WARMUP_TIMEOUT SGLANG_WEIGHT_CACHE_SOCKET_TEMPLATE
        SGLANG_WEIGHT_CACHE_READY_TEMPLATE RUNAI_STREAMER_CONCURRENCY
        RUNAI_STREAMER_MEMORY_LIMIT RUNAI_STREAMER_S3_ENDPOINT SGLANG_EXPERT_CACHE_VRAM_MIB
        SGLANG_EXPERT_PACK_STATS_PATH SGLANG_EXPERT_STAGE_SLOTS SGLANG_LORA_CONFIG_DIR
        SGLANG_MOE_CONFIG_DIR TMPDIR XDG_CACHE_HOME
    """,
    "HTTP, gRPC, sockets and ports.": """
        SGLANG_ENABLE_REQUEST_DECOMPRESSION SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES
        DISABLE_OPENAPI_DOC SGLANG_TIMEOUT_KEEP_ALIVE
        SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT SGLANG_HTTP_SERVER_APP_PATH
        SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION SGLANG_EXPOSE_OWN_ENV_VARS
        SGLANG_DIAG_BYPASS_HEALTH_GENERATE SGLANG_USE_PICKLE_IPC
        SGLANG_LOG_PICKLE_IPC_OBJECTS SGLANG_ZMQ_ALLOWED_PEERS SGLANG_ZMQ_SOURCE_IP
        SGLANG_USE_MESSAGE_QUEUE_BROADCASTER SGLANG_TCP_STORE_PORT SGLANG_PORT
        SGLANG_BACKUP_PORT_BASE SGLANG_GRPC_PORT SGLANG_GRPC_WORKER_THREADS
        SGLANG_RUST_SERVER SGLANG_RUST_BUILD_MODE SGLANG_MAX_BATCH_REQS_PER_HTTP_REQ
        AIP_PREDICT_ROUTE MASTER_PORT SGLANG_DETOKENIZER_MAX_STATES
        SGLANG_HEALTH_CHECK_TIMEOUT SGLANG_OLLAMA_CHAT_ROUTE SGLANG_OLLAMA_GENERATE_ROUTE
        SGLANG_OLLAMA_ROOT_ROUTE SGLANG_OLLAMA_SHOW_ROUTE SGLANG_OLLAMA_TAGS_ROUTE
        SGLANG_WAIT_PORT_TIMEOUT SGLANG_WAIT_WEIGHTS_READY_TIMEOUT SGL_FORCE_SHUTDOWN
    """,
    "Logs, metrics, traces and profiles.": """
        SGLANG_LOG_GC SGLANG_LOG_FORWARD_ITERS SGLANG_LOG_DECODE_GRAPH_KEY SGLANG_LOG_MS
        SGLANG_LOG_REQUEST_EXCEEDED_MS SGLANG_LOG_REQUEST_HEADERS
        SGLANG_LOG_SCHEDULER_STATUS_TARGET SGLANG_LOG_SCHEDULER_STATUS_INTERVAL
        SGLANG_JIT_LOG_LEVEL SGLANG_ENABLE_RANK_CONSENSUS_CHECKER SGLANG_PROFILE_WITH_STACK
        SGLANG_PROFILE_RECORD_SHAPES SGLANG_PROFILE_V2 SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS
        SGLANG_ENABLE_NVTX_SCHEDULER SGLANG_ENABLE_NVTX_OPERATIONS SGLANG_RECORD_STEP_TIME
        SGLANG_ENABLE_CUDA_GRAPH_CAPTURE_TRACE SGLANG_GRAPH_BATCH_CAPTURE
        SGLANG_TORCH_PROFILER_DIR SGLANG_MEM_PROFILE_MAX_ENTRIES
        SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS
        SGLANG_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE SGLANG_TRACE_ASYNC
        SGLANG_TRACE_ASYNC_FLUSH_THRESHOLD SGLANG_ENABLE_METRICS_DEVICE_TIMER
        SGLANG_ENABLE_METRICS_DP_ATTENTION SGLANG_TRACE_LOGITS_E2E
        SGLANG_TRACE_LOGITS_E2E_SYNC SGLANG_TRACE_SAMPLER_E2E
        SGLANG_TRACE_QWEN_MOE_DEEPEP_E2E SGLANG_DEEPEP_V2_TRACE_CONTIG
        SGLANG_DEEPEP_V2_TRACE_MASKED CUDA_COREDUMP_FILE CUDA_COREDUMP_PIPE
        CUDA_ENABLE_USER_TRIGGERED_COREDUMP DUMPER_SERVER_PORT FA_LOG_LEVEL
        LLGUIDANCE_LOG_LEVEL MEGA_USE_NCU OTEL_SERVICE_NAME PROMETHEUS_MULTIPROC_DIR
        SGLANG_DSA_KPOOL_DEBUG_BOUNDS SGLANG_DUMP_LOADER_DIR SGLANG_GFX_ASM_CTX_GATHER_CHECK
        SGLANG_LOGGING_CONFIG_PATH SGLANG_MAMBA_DEBUG_ASSERTS SGLANG_NSYS_PROFILING
        SGLANG_PREFILL_DELAYER_DEBUG_LOG SGLANG_ROUTING_KEY_POLICY_DEBUG_LOG
        SGLANG_TRACE_LEVEL TENSOR_DUMP_LAYERS_MODULE_NAME TENSOR_DUMP_TOP_LEVEL_MODULE_NAME
        TLLM_LOG_LEVEL WAVE_DUMP_MLIR
    """,
    "Of SGLang's own tests.": """
        SGLANG_IS_IN_CI SGLANG_IS_IN_CI_AMD SGLANG_TEST_MAX_RETRY
        SGLANG_TEST_TI2I_INPUT_IMAGE SGLANG_JIT_KERNEL_RUN_FULL_TESTS
        SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK SGLANG_TEST_METRICS_FILE
        SGLANG_TEST_PD_DISAGG_BACKEND SGLANG_TEST_PD_DISAGG_DEVICES
        SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB SGLANG_TEST_SCRIPTED_RUNTIME
        SGLANG_TEST_SCRIPTED_RUNTIME_IPC_ADDR
        SGLANG_TEST_SCRIPTED_RUNTIME_OUT_OF_BAND_ERROR_PATH
        SGLANG_TEST_SCRIPTED_RUNTIME_SYS_PATH_ENTRY FLASHINFER_USE_CUDA_NORM FLA_CI_ENV
        GITHUB_REPOSITORY GITHUB_RUN_ATTEMPT GITHUB_RUN_ID RUNNER_TEMP
        SGLANG_CI_DISABLE_MOE_FUSED_FUNC
    """,
    "What happens at a crash or at the end.": """
        SGLANG_CUDA_COREDUMP SGLANG_CUDA_COREDUMP_DIR SGLANG_FORCE_SHUTDOWN
        SGLANG_PYSPY_DUMP_BEFORE_CRASH SGLANG_CUDA_COREDUMP_BEFORE_CRASH
        SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS
    """,
    "Which tokens are chosen or shown: pages are found by tokens.": """
        SGLANG_GRAMMAR_POLL_INTERVAL SGLANG_GRAMMAR_MAX_POLL_ITERATIONS
        SGLANG_DISABLE_OUTLINES_DISK_CACHE SGLANG_FORWARD_UNKNOWN_TOOLS EXA_API_KEY
        SGLANG_EXA_NUM_RESULTS SGLANG_EXA_SEARCH_TYPE SGLANG_EXA_INCLUDE_HIGHLIGHTS
        SGLANG_TOOL_STRICT_LEVEL SGLANG_ENABLE_RESPONSE_TEMPLATE_TURN_GRAMMAR
        SGLANG_EMBEDDINGS_SPARSE_HEAD SGLANG_MAX_THINK_TOKENS SGLANG_PATCH_TOKENIZER
        SGLANG_BATCH_TOKENIZER_OUTPUTS SGLANG_PARALLEL_PROMPT_ENCODE
        SGLANG_PARALLEL_PROMPT_ENCODE_MIN_CHARS SGLANG_REQUEST_STATE_WAIT_TIMEOUT
        SGLANG_DEFAULT_THINKING TOKENIZERS_PARALLELISM
    """,
    "Of SGLang's own tests: delays, crashes and retractions, which change no number.": """
        SGLANG_TEST_STUCK_DETOKENIZER SGLANG_TEST_STUCK_DP_CONTROLLER
        SGLANG_TEST_STUCK_SCHEDULER_INIT SGLANG_TEST_STUCK_TOKENIZER
        SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS SGLANG_TEST_REQUEST_TIME_STATS
        SGLANG_TEST_DISAGG_FAILURE_PROB SGLANG_TEST_DISAGG_KV_CHECKSUM_MISMATCH_PROB
        SGLANG_TEST_RETRACT SGLANG_TEST_RETRACT_INTERVAL SGLANG_TEST_RETRACT_NO_PREFILL_BS
        SGLANG_TEST_MAMBA_LAZY_ALLOC_FAIL SGLANG_TEST_SKIP_CACHE_HIT_ASSERT
        SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES
    """,
    "Checks, which stop a server or say something and change no number.": """
        SGLANG_DETECT_SLOW_RANK SGLANG_DEBUG_MEMORY_POOL
        SGLANG_VALIDATE_MAMBA_REPLAY_STATE_INDICES SGLANG_GDN_DECODE_FUSION_LOG_LAYER_HITS
        SGLANG_GDN_DECODE_FUSION_VERIFY_REAL_TENSORS SGLANG_DEBUG_POISON_POOL
        SGLANG_PHASE_CHECKER_DEBUG SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK
        SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY
        SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK
        SGLANG_CHECK_KV_PAGE_INVARIANTS SGLANG_TBO_DEBUG SGLANG_ENABLE_ASYNC_ASSERT
        SGLANG_ENABLE_NAN_LOGITS_CHECK SGLANG_INVARIANT_CHECK SGLANG_KV_CANARY_RING_CAPACITY
        SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS
        SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE
        SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT
        SGLANG_KV_CANARY_SWA_DIVERGENCE_STATS_INTERVAL SGLANG_KV_CANARY_ENABLE_MHA_V
    """,
    "Draft tokens: which are proposed and accepted, and how fast. Pages of those "
    "that are do not depend on it.": """
        SGLANG_DSPARK_SIMULATE_FOLD SGLANG_DSPARK_DEBUG_CONFIDENCE_PREFIX_SCHEDULER
        SGLANG_DSPARK_DEBUG_CONFIDENCE_METRICS SGLANG_DSPARK_DEBUG_DUMP
        SGLANG_DSPARK_LOG_SPS_PRED_INTERVAL SGLANG_DSPARK_STS_COLLECT_PATH
        SGLANG_DSPARK_BLOCK_ACCEPT_ESTIMATE_PATH SGLANG_DSPARK_BLOCK_ACCEPT_ONLINE_INTERVAL
        SGLANG_DSPARK_ENABLE_SPS_RECORD SGLANG_DSPARK_FAST_KERNEL SGLANG_DSPARK_FP32_LM_HEAD
        SGLANG_DSPARK_USE_GREEDY_DRAFT SGLANG_DSPARK_FOLDED_PROPOSAL
        SGLANG_DSPARK_EMBED_IN_GRAPH SGLANG_DSPARK_OPT_MARKOV_W2_BF16
        SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD SGLANG_DSPARK_NVLINK_VOCAB_GATHER
        SGLANG_DSPARK_ENABLE_MULTI_STREAM SGLANG_DSPARK_CONFIDENCE_RELAY_LAG_STEPS
        SGLANG_DSPARK_FUSED_ACCEPT_TAIL SGLANG_DSPARK_ACCEPT_TAIL_MIN_BS
        SGLANG_DSPARK_ACCEPT_TAIL_MAX_BS SGLANG_OPT_DSV41_DSPARK_DRAFT_PREP_FORK
        SGLANG_OPT_DSV41_DSPARK_POST_FOLD SGLANG_OPT_DSV41_DSPARK_SKIP_PREFILLED_INPUTS
        SGLANG_OPT_DSV41_DSPARK_SIM_DRAW_AHEAD SGLANG_OPT_DSV41_BLOCKWISE_REJECTION
        SGLANG_OPT_DSV41_DSPARK_ONE_LAUNCH_COMMIT_STAGE SGLANG_ENABLE_OVERLAP_PLAN_STREAM
        SGLANG_ENABLE_PP_SPEC SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION
        SGLANG_ENABLE_METADATA_GLUE_GRAPH SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR
        SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN SGLANG_OPT_FUSED_KDA_VERIFY
        SGLANG_DFLASH_EAGER_DRAFT_SAMPLER SGLANG_ENABLE_LILICORR_SAMPLING
        SGLANG_LILICORR_REQUIRE_SAMPLING SGLANG_RAGGED_VERIFY_MODE
        SGLANG_TEST_RAGGED_VERIFY_FORCE_UNIFORM_CAPTURE
        SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND SGLANG_SPEC_TP_SYNC
        SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH SGLANG_ENABLE_SPLITKV_VERIFY
        SGLANG_NGRAM_FORCE_GREEDY_VERIFY
    """,
    "How much room there is for pages and how they are moved within it.": """
        SGLANG_NATIVE_MOVE_KV_CACHE SGLANG_DISABLE_LAZY_COMPACTION
        SGLANG_LOG_LAZY_COMPACTION_STATS SGLANG_LOG_LAZY_COMPACTION_STATS_INTERVAL_SEC
        SGLANG_LAZY_COMPACTION_MAX_MOVES_PER_CALL SGLANG_COMPACTION_MAX_PAGES_PER_MOVE
        SGLANG_ENABLE_KV_SHARD_ZERO_SM_GATHER SGLANG_AITER_UNIFIED_DRAFT_EXTEND
        SGLANG_AITER_ASM_PREFILL_HD128 SGLANG_AITER_PAGED_PREFILL_ASM
        SGLANG_ENABLE_POST_CAPTURE_KV_SIZING
    """,
    "Which requests run when, and for how long: the same tokens have the same pages, "
    "up to rounding.": """
        SGLANG_ENABLE_WAITING_PREFIX_REFRESH SGLANG_INIT_NEW_TOKEN_RATIO
        SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS
        SGLANG_RETRACT_DECODE_STEPS SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
        SGLANG_MAX_NEW_TOKENS_LIMIT SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR
        SGLANG_CACHE_HIT_RATE_WINDOW_SECONDS SGLANG_PREFILL_DELAYER_MAX_DELAY_PASSES
        SGLANG_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK
        SGLANG_DATA_PARALLEL_BUDGET_INTERVAL SGLANG_PREFILL_TILE_BUDGET
        SGLANG_PREFILL_TILE_BUDGET_MODE SGLANG_PREFILL_DELAYER_MAX_PREFILL_BS_WINDOW_SIZE
        SGLANG_EXACT_CHUNK_FILL SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DEFAULT
        SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DECODE
        SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_TARGET_VERIFY
        SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_NONE SGLANG_EMPTY_CACHE_INTERVAL
        SGLANG_SCHEDULER_MAX_RECV_PER_POLL SGLANG_SCHEDULER_SKIP_ALL_GATHER
        SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION
        SGLANG_REQ_WAITING_TIMEOUT SGLANG_REQ_RUNNING_TIMEOUT SGLANG_FORCE_STREAM_INTERVAL
        SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP SGLANG_ENABLE_DELAY_SAMPLE
        SGLANG_ENABLE_WAR_BARRIER SGLANG_FORCE_COARSE_WAR_BARRIER
        SGLANG_ENABLE_PREFILL_WAR_READ_DONE SGLANG_PP_SKIP_PURE_CHUNKED_OUTPUT_COMM
        SGLANG_PP_COMM_OVERLAP SGLANG_NCCL_ALL_GATHER_IN_OVERLAP_SCHEDULER_SYNC_BATCH
        SGLANG_ENABLE_DISAGG_PREFILL_CONTINUOUS_INPUT_POLLING
        SGLANG_FORCE_CONFIDENTIAL_COMPUTE IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD
        IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD
    """,
    "Which pages are kept, in which tier, and when they move; not what they hold.": """
        SGLANG_RADIX_FORCE_MISS SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD
        SGLANG_MAX_KV_CHUNK_CAPACITY SGLANG_DISABLE_HISPARSE_PREFETCH
        SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS SGLANG_SWA_EVICTION_INTERVAL
        SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND SGLANG_OPT_RELEASE_PREFILL_SWA
        SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB SGLANG_HICACHE_TMA_TRANSFER
        SGLANG_MLA_DEDUP_CHUNK_TOKENS SGLANG_HICACHE_HF3FS_CONFIG_PATH
        SGLANG_HICACHE_DECODE_OFFLOAD_STRIDE SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM
        SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE
        SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO
        SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE
        SGLANG_HICACHE_FILE_BACKEND_ENABLE_METADATA_CACHE
        SGLANG_HICACHE_FILE_BACKEND_METADATA_TTL SGLANG_HICACHE_BUFFER_ANCHOR_LOCK_CAP
        SGLANG_ENABLE_HICACHE_SWA_TAIL_ONLY_BACKUP SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR
        SGLANG_HICACHE_NIXL_USE_DIRECT_IO SGLANG_HUGEPAGE_SIZE
        SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY
        SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE HSA_USERPTR_FOR_PAGED_MEM
        SGLANG_HICACHE_HOST_MEM_BACKEND
    """,
    "Between which servers or ranks bytes travel, and by which way; they arrive as "
    "they were sent.": """
        SGLANG_DISAGGREGATION_THREAD_POOL_SIZE SGLANG_DISAGGREGATION_QUEUE_SIZE
        SGLANG_ENABLE_DISAGG_SAMPLING_MASK SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS
        SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT
        SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE
        SGLANG_DISAGGREGATION_WAITING_TIMEOUT SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT
        SGLANG_DISAGGREGATION_NIXL_BACKEND SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS
        SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX SGLANG_DISAGGREGATION_ZMQ_MAX_SOCKETS
        SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER
        SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK
        SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL
        SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE
        SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT
        SGLANG_DISAGG_STAGING_BUFFER SGLANG_DISAGG_STAGING_POOL_SIZE_MB
        SGLANG_STAGING_USE_TORCH SGLANG_MOONCAKE_CUSTOM_MEM_POOL
        SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE
        ASCEND_NPU_PHY_ID SGLANG_MOONCAKE_SEND_AUX_TCP SGLANG_ENABLE_FAILED_SESSION_PROBE
        SGLANG_FAILED_SESSION_PROBE_INTERVAL_S SGLANG_FAILED_SESSION_PROBE_MAX_INTERVAL_S
        SGLANG_FAILED_SESSION_IDLE_TIMEOUT_S SGLANG_HICACHE_MOONCAKE_CONFIG_PATH
        SGLANG_HICACHE_MOONCAKE_REUSE_TE MOONCAKE_MASTER MOONCAKE_CLIENT
        MOONCAKE_LOCAL_HOSTNAME MOONCAKE_TE_META_DATA_SERVER MOONCAKE_GLOBAL_SEGMENT_SIZE
        MOONCAKE_PROTOCOL MOONCAKE_DEVICE MOONCAKE_MASTER_METRICS_PORT MOONCAKE_CHECK_SERVER
        MOONCAKE_STANDALONE_STORAGE MOONCAKE_ENABLE_SSD_OFFLOAD
        MOONCAKE_OFFLOAD_FILE_STORAGE_PATH MOONCAKE_TENANT_ID
        SGLANG_HICACHE_MEMCACHE_CONFIG_PATH SGLANG_NPU_MEMCACHE_ENABLE_WARMUP
        SGLANG_DEEPEP_V2_FORCE_MAX_LEN SGLANG_MORI_SEND_AUX_RDMA SGLANG_MORI_QP_PER_TRANSFER
        SGLANG_MORI_POST_BATCH_SIZE SGLANG_MORI_NUM_WORKERS SGLANG_MORI_TRANSFER_SHARDS
        SGLANG_MORI_WAIT_POLL_MS SGLANG_MORI_TRANSFER_TIMEOUT_MS
        SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK SGLANG_MORI_EP_V2
        SGLANG_MORI_PREALLOC_MAX_RECV_TOKENS SGLANG_MORI_RECV_BOUND
        SGLANG_OPT_MXFP4_DEFERRED_FINALIZED_SHAPE SGLANG_MORI_MOE_MAX_INPUT_TOKENS
        ASCEND_MF_STORE_URL ASCEND_MF_TRANSFER_PROTOCOL AWS_DEFAULT_BUCKET AWS_ENDPOINT_URL
        DEEPEP_HCCL_BUFFSIZE EP_REUSE_NCCL_COMM FLEXKV_CONFIG_PATH
        FLEXKV_ENABLE_LAYERWISE_TRANSFER FLEXKV_LAYERWISE_EVENTFD_CONNECT_MAX_RETRIES
        HCCL_BUFFSIZE MC_FORCE_TCP MORI_ENABLE_SDMA MORI_RDMA_DEVICES
        NVSHMEM_DISABLE_LOCAL_ONLY_PROXY NVSHMEM_IB_ENABLE_IBGDA NVSHMEM_QP_DEPTH
        NVSHMEM_REMOTE_TRANSPORT SGLANG_HICACHE_NIXL_BACKEND_PLUGIN
        SGLANG_MOONCAKE_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK
        SGLANG_MORI_DISPATCH_INTER_KERNEL_SWITCH_THRESHOLD SGLANG_MORI_NO_PAD_MASK
        SICL_NET_DEVICES UCX_NET_DEVICES UMBP_LAYER_GROUP UMBP_LOAD_SPLIT
        UMBP_OFFLOAD_COALESCE_PAGES UMBP_RANGES_PER_CALL UMBP_SPDK_PROXY_TENANT_ID
        UMBP_STANDALONE_ADDRESS
    """,
    "How ranks of a layer share its computing, and by which way they sum: rounding.": """
        SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS SGLANG_RAY_BUNDLE_INDICES
        SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE SGLANG_IS_FIRST_RANK_ON_NODE
        SGLANG_SYNC_TOKEN_IDS_ACROSS_TP SGLANG_ENABLE_COLOCATED_BATCH_GEN
        SGLANG_SHARED_EXPERT_TP1 SGLANG_ENABLE_EMBED_REPLICATION
        SGLANG_SYMM_MEM_PREALLOC_GB_SIZE SGLANG_DEBUG_SYMM_MEM
        SGLANG_ENABLE_GDN_DECODE_FUSED_PROJ_CONV NCCL_ALGO NCCL_CUMEM_ENABLE
        NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS
        NCCL_MNNVL_ENABLE NCCL_NVLS_ENABLE ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB
        SGLANG_AITER_CAPTURE_COPY_IN SGLANG_DP_MASK_PAD_ROWS SGLANG_DP_SHARED_EXPERT_LOCAL
        SGLANG_DP_USE_GATHERV SGLANG_NCCL_SO_PATH SGLANG_RINGBUFFER_WARNING_INTERVAL
        SGLANG_SKIP_P2P_CHECK SGLANG_USE_AITER_AR SGLANG_USE_ROCM700A
        SYNC_TOKEN_IDS_ACROSS_TP
    """,
    "Which kernel computes, fused or split how: the same numbers up to rounding.": """
        SGLANG_USE_AITER SGLANG_DISABLE_GFX1250_FP8_GEMM SGLANG_AITER_INTREE_GEMM_TUNE
        SGLANG_AITER_INTREE_MHC_TILE_M16 SGLANG_M3_USE_AITER_FUSED_QKNORM
        SGLANG_USE_AITER_AG SGLANG_DP_USE_REDUCE_SCATTER SGLANG_USE_AITER_UNIFIED_ATTN
        SGLANG_USE_AITER_MOE_GU_ITLV SGLANG_GFX1250_W4A8_KERNEL_GATHER
        SGLANG_AITER_MOE_SORTING_DISPATCH_POLICY SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED
        SGLANG_OPT_BEAM_DECODE_GEMV SGLANG_AITER_FUSE_RMSNORM_PAD
        SGLANG_ROCM_FUSED_DECODE_MLA USE_ROCM_AITER_ROPE_BACKEND
        SGLANG_ROCM_USE_MULTI_STREAM SGLANG_ROCM_SMALLM_ROUTER SGLANG_ROCM_SMALLM_MOE
        SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM SGLANG_ROCM_K3_FUSE_KDA_INPROJ
        SGLANG_ROCM_K3_FUSE_KDA_INPROJ_MAX_TOKENS SGLANG_HACK_FLASHMLA_BACKEND
        SGLANG_AMD_USE_FLYDSL_MEGA_MOE SGLANG_AMD_FLYDSL_MEGA_MOE_MTPR
        SGLANG_AMD_FLYDSL_MEGA_MOE_DECODE_MTPR SGLANG_AITER_MEGA_RANK_SYNC
        SGLANG_AITER_MEGA_EPLB_PREFILL_ONLY SGLANG_AITER_MEGA_EPLB_FUSED_MAP_RECORD
        SGLANG_AITER_HONOR_EXPLICIT_MEM_FRACTION SGLANG_AITER_MLA_GLUON
        SGLANG_AITER_MLA_DECODE_BACKEND SGLANG_AITER_MLA_VERIFY_BACKEND
        SGLANG_AITER_MLA_AUTO_KV_SPLITS SGLANG_AITER_GFX942_BLOCKSCALE_USE_CK
        SGLANG_OPT_USE_AITER_SILU_MUL SGLANG_OPT_USE_FUSED_QK_NORM_ROPE
        SGLANG_OPT_FUSED_QK_NORM_ROPE_VERIFY SGLANG_OPT_USE_AITER_INDEXER
        SGLANG_ROCM_OPT_DSPARK_FP8_LM_HEAD SGLANG_DSV4_FP4_LOGITS_BUDGET_MB
        SGLANG_MLA_HCA_KV_SPLITS SGLANG_USE_MLX SGLANG_MLX_FUSE_SWIGLU
        SGLANG_MLX_CLEAR_CACHE_STEPS SGLANG_MLX_CACHE_LIMIT_GB
        SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT SGLANG_NPU_USE_MULTI_STREAM
        SGLANG_NPU_FINE_GRAINED_MOE_DUAL_STREAM SGLANG_NPU_USE_FIAS_V2_BSND
        SGLANG_OPT_NPU_BF16_WO_A_GEMM SGLANG_NPU_FORWARD_NATIVE_GELUTANH
        SGLANG_NPU_FORWARD_NATIVE_GEMMA_RMS_NORM SGLANG_USE_AG_AFTER_QLORA
        SGLANG_NPU_USE_TRITON_PREFIX_KV_CACHE_STORE SGLANG_ZBAL_LOCAL_MEM_SIZE
        SGLANG_ZBAL_BOOTSTRAP_URL SGLANG_NPU_ATTN_BACKEND_NEEDS_CPU_SEQ_LENS
        SGLANG_MUSA_FA3_FORCE_UPDATE_METADATA SGLANG_XPU_LN_MOD_NUM_WARPS
        SGLANG_FORCE_FP8_MARLIN SGLANG_ENABLE_FP8_GEMM_CONFIG_TUNE
        SGLANG_HUMMING_MOE_GEMM_TYPE SGLANG_IS_FLASHINFER_AVAILABLE
        SGLANG_FLASHINFER_USE_PAGED SGLANG_FLASHINFER_WORKSPACE_SIZE
        SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK
        SGLANG_FLASHINFER_MEGAMOE_MAX_TOKENS_PER_RANK
        SGLANG_FLASHINFER_MEGAMOE_IN_KERNEL_FC2_REDUCE SGLANG_TRTLLM_MOE_PDL_MAX_TOKENS
        SGLANG_FLASHINFER_MOE_FUSED_FINALIZE SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT
        SGLANG_OPT_SM120_MTP_ROUTER_TOP22 SGLANG_EXPERIMENTAL_LORA_OPTI
        SGLANG_ENABLE_LORA_CSGMV_SPLIT_K SGLANG_TRTLLM_MHA_DECODE_SEQ_LEN_SPLITS
        SGLANG_SM120_FLASHMLA_BACKEND SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE
        SGLANG_FLASHINFER_DECODE_SPLIT_TILE_SIZE SGLANG_FLASHINFER_AUTOTUNE_CACHE
        SGLANG_FLASHINFER_AUTOTUNE_EXTEND SGLANG_ENABLE_FLUX3_PRIMS_TS_AUTOTUNE
        SGLANG_OPT_FLUX3_PRIMS_TS_TUNING_BUCKETS SGLANG_TRITON_DECODE_ATTN_STATIC_KV_SPLITS
        SGLANG_USE_CUSTOM_TRITON_KERNEL_CACHE SGLANG_DISABLE_LEAN_ATTENTION
        SGLANG_FORCE_LEAN_GRID_CU_MULT SGLANG_TRITON_COMPACT_EXTEND_ATTENTION
        SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY SGLANG_TRITON_SLOW_COMPILE_THRESHOLD_SECS
        SGLANG_TRITON_LOAD_WARNING_THRESHOLD_GB SGLANG_MLA_DECODE_TUNE
        SGLANG_TRITON_DENSE_PREFILL_ATTN SGLANG_ENABLE_TORCH_COMPILE
        SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE SGLANG_ENABLE_JIT_DEEPGEMM
        SGLANG_ENABLE_BF16_SPLITK_GEMM SGLANG_DEEPGEMM_STANDARD_LAYOUT
        SGLANG_DEEPGEMM_MASKED_MEMORY_BUDGET_FRACTION SGLANG_OPT_DG_MASKED_M_CAP
        SGLANG_OPT_DG_COMPACT_EAGER SGLANG_OPT_MASK_DP_PAD_MOE
        SGLANG_JIT_DEEPGEMM_PRECOMPILE SGLANG_JIT_DEEPGEMM_FAST_WARMUP
        SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE SGLANG_DG_CACHE_DIR SGLANG_DG_USE_NVRTC
        SGLANG_USE_DEEPGEMM_BMM SGLANG_DEEPGEMM_SANITY_CHECK SGLANG_DEEPGEMM_PDL
        SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK
        SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK SGLANG_DEEPEP_V2_NUM_SMS
        SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND SGLANG_DEEPEP_LL_COMBINE_SEND_NUM_SMS
        SGLANG_BLACKWELL_OVERLAP_SHARED_EXPERTS_OUTSIDE_SBO
        SGLANG_ENABLE_QWEN_DEEPEP_SHARED_OVERLAP SGLANG_DISABLE_STATIC_WATERFILL
        SGLANG_NIXL_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK
        SGLANG_PPLX_NUM_MAX_DISPATCH_TOKENS_PER_RANK SGLANG_ENABLE_MOE_DEFERRED_FINALIZE
        SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS SGLANG_OPT_MOE_QUANT_ONCE
        SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK
        SGLANG_OPT_DEEPGEMM_MEGA_MOE_RESERVED_SMS
        SGLANG_OPT_DEEPGEMM_MEGA_MOE_FUSE_SHARED_EXPERTS SGLANG_OPT_DEEPGEMM_MEGA_GATE
        SGLANG_OPT_USE_FUSED_HASH_TOPK SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK
        SGLANG_OPT_USE_TOPK_V2 SGLANG_MINICPM_FUSE_TOPK SGLANG_USE_SGL_FA3_KERNEL
        SGLANG_FORCE_FUSED_OP_BACKEND USE_TRITON_W8A8_FP8_KERNEL SGLANG_MOE_PADDING
        SGLANG_USE_1STAGE_ALLREDUCE SGLANG_DETERMINISTIC_NCCL_NCHANNELS
        SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2 SGLANG_CUSTOM_ALL_REDUCE_V2_MAX_SIZE_KB
        SGLANG_FORCE_CUSTOM_ALL_REDUCE_V2_PULL_SIZE_KB
        SGLANG_FORCE_CUSTOM_ALL_REDUCE_V2_PUSH_SIZE_KB SGLANG_ENABLE_PCIE_IPC_ALLREDUCE
        SGLANG_PCIE_IPC_MAX_NUMEL SGLANG_SPEC_EXPANSION_SAFETY_FACTOR
        SGLANG_ROPE_CACHE_SAFETY_MARGIN SGLANG_ROPE_CACHE_ALIGN
        SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK
        SGLANG_USE_BREAKABLE_CUDA_GRAPH SGLANG_ENABLE_CUDA_GRAPH_DEDUP
        SGLANG_MEMORY_SAVER_CUDA_GRAPH SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH
        SGLANG_ENABLE_GRAPH_POOL_BORROW SGLANG_ENABLE_GRAPH_POOL_PRECARVE
        SGLANG_EAGER_INPUT_NO_COPY SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND
        SGLANG_KDA_PREFILL_GRAPH_MAX_SEQS SGLANG_DSV4_REASONING_EFFORT
        SGLANG_DSV41_REASONING_EFFORT SGLANG_DSV4_DECODER_TAIL_GRAPH_MAX_ROWS
        SGLANG_DSV4_DECODER_TAIL_GRAPH_MIN_PREFILL_TOKENS SGLANG_DSV4_FLYDSL_DECODE
        SGLANG_DSV4_FLYDSL_DECODE_SOURCE SGLANG_DSV4_FLYDSL_DECODE_H128
        SGLANG_DSV4_FP8_DECODE_SPLIT_MODEL SGLANG_DSV4_FP8_DECODE_SPLIT_CTX
        SGLANG_DSV4_FP8_HCA_PERSIST SGLANG_DSV4_FP8_HCA_PERSIST_MIN_ROWS
        SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE SGLANG_OPT_ENGRAM_EXTEND_HASH
        SGLANG_OPT_DSV41_MEGA_MHC_PREFILL SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT
        SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS
        SGLANG_OPT_DEEPGEMM_HC_PRENORM SGLANG_OPT_USE_TILELANG_MHC_PRE
        SGLANG_OPT_USE_TILELANG_MHC_POST SGLANG_OPT_USE_FLASHINFER_MHC
        SGLANG_OPT_FUSE_MHC_POST_PRE SGLANG_OPT_USE_TILELANG_INDEXER
        SGLANG_OPT_DSV4_NONPAGED_INDEXER SGLANG_OPT_DSV4_NONPAGED_INDEXER_MIN_QUERY_TOKENS
        SGLANG_OPT_USE_JIT_INDEXER_METADATA SGLANG_FP8_PAGED_MQA_LOGITS_TORCH
        SGLANG_OPT_FLASHMLA_SPARSE_PREFILL SGLANG_OPT_HIP_OPUS_SPARSE_PREFILL
        SGLANG_HIP_DSPARK_DRAFT_RAW_METADATA SGLANG_ROCM_MXFP8_AITER_PRESHUFFLE
        SGLANG_HIP_MHC_BOUNDARY_WIDE_TILE SGLANG_OPT_FP8_WO_A_FUSED_INVROPE
        SGLANG_DSV41_FUSED_WO_A SGLANG_OPT_USE_AITER_BATCHED_GEMM
        SGLANG_OPT_BF16_FP32_GEMM_ALGO SGLANG_OPT_FUSE_WQA_WKV
        SGLANG_OPT_DSV41_DSPARK_PREPARE_INPUTS_ONCE SGLANG_OPT_DSV41_DSPARK_MID_FOLD
        SGLANG_OPT_DSV41_TARGET_VERIFY_METADATA_GLUE SGLANG_OPT_DSV41_TARGET_METADATA_EARLY
        SGLANG_OPT_SKIP_GLUED_REPLAY_VIEW SGLANG_OPT_DSV41_POST_FORWARD_CUDA_GRAPH
        SGLANG_OPT_DSV41_SAMPLING_ACCEPT_GRAPH SGLANG_OPT_USE_MULTI_STREAM_OVERLAP
        SGLANG_OPT_USE_FUSED_GATE_TOPK SGLANG_OPT_USE_GATE_TOPK_JIT
        SGLANG_OPT_GATE_GEMV_MODE SGLANG_ENABLE_SINGLE_CG_DRAFT SGLANG_OPT_USE_GUMBEL_SAMPLE
        SGLANG_OPT_USE_INKLING_MULTI_STREAM_OVERLAP SGLANG_OPT_USE_INKLING_SHEARED_BIAS
        SGLANG_OPT_LINEARIZED_SHARED_SINK SGLANG_OPT_USE_INKLING_CUSTOM_AR
        SGLANG_OPT_USE_INKLING_FUSED_AR_SCONV_NORM SGLANG_OPT_USE_INKLING_FUSED_AR_SCONV
        SGLANG_OPT_USE_INKLING_FUSED_ATTN_PROLOGUE SGLANG_OPT_USE_INKLING_SHARED_FUSED_MOE
        SGLANG_OPT_USE_INKLING_FUSED_AR_SHARED SGLANG_OPT_USE_INKLING_FUSED_LOG_TAU
        SGLANG_OPT_USE_INKLING_REL_PROJ_DISPATCH SGLANG_INKLING_DEFAULT_REASONING_EFFORT
        SGLANG_DSA_FUSE_TOPK SGLANG_EXPERIMENTAL_DSA_KPOOL_METADATA_FUSION
        SGLANG_DSA_TOPK_FLASHINFER_DETERMINISTIC SGLANG_DSA_TOPK_FLASHINFER_TIE_BREAK
        SGLANG_DSA_MQA_LOGITS_FREE_MEM_FRACTION SGLANG_ENABLE_PCG_DSV2_DUAL_STREAM
        SGLANG_DSA_TOPK_BROADCAST SGLANG_ENABLE_DSA_Q8KV8_TOPK_LENGTH
        SGLANG_ENABLE_DSA_Q8KV8_QPREP_OVERLAP SGLANG_ENABLE_DSA_Q8KV8_KV_CAT_FUSION
        SGLANG_OPT_Q8KV8_QPREP_VARIANT SGLANG_ENABLE_MUSE_SPARK_FINALIZE_AR
        SGLANG_ENABLE_MUSE_SPARK_AG_NORM_FUSION SGLANG_USE_CUSTOM_ROUTER_SUM
        SGLANG_OPT_USE_BF16_ROUTER_GEMM SGLANG_OPT_USE_MSA_DECODE_UNDER_GRAPH
        SGLANG_MINIMAX_VIT_TOKEN_BLOCK SGLANG_OPT_USE_MINIMAX_DECODE_TOPK_RADIX
        SGLANG_OPT_USE_MINIMAX_FUSED_KV_INDEX_STORE SGLANG_MINIMAX_M3_FUSED_MOE_COMBINE
        SGLANG_MINIMAX_M3_INDEXER_CP SGLANG_OPT_USE_MINIMAX_GLUON_PREFILL
        SGLANG_MINIMAX_NPU_PREFILL_FIA SGLANG_MINIMAX_NPU_NATIVE_INDEXER
        SGLANG_MINIMAX_NPU_NATIVE_ATTN SGLANG_M3_ALLOW_CUSTOM_AR SGLANG_K3_AR_FUSION
        SGLANG_K3_SP_COLLECTIVE SGLANG_K3_SP_ATTN_RES SGLANG_K3_FUSED_FRONT
        SGLANG_K3_RADIX4_TOPK SGLANG_KIMI_K3_VIT_CUDA_GRAPH_CACHE_CAPACITY
        SGLANG_KIMI_K3_VIT_CUDA_GRAPH_MIN_HITS SGLANG_KIMI_K3_VIT_CUDA_GRAPH_MAX_SEQLEN
        AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS AITER_FLYDSL_EP_NO_FAKE_EXPERT ASCEND_USE_FA
        CK_MOE FA_CLC FA_DISABLE_2CTA FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH
        FLA_CACHE_RESULTS FLA_COMPILER_MODE FLA_USE_CUDA_GRAPH FLA_USE_FAST_OPS
        FMHA_SM100_ALLOW_JIT GDN_RECOMPUTE_SUPPRESS_LEVEL MINIMAX_NPU_PREFILL_BSQ
        SGLANG_AITER_MLA_PERSIST SGLANG_AITER_UNIFIED_VERIFY SGLANG_ALT_STREAM
        SGLANG_ASM_VERIFY_ATTN SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_COMPARISON_TEST
        SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM
        SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT SGLANG_DEEPGEMM_ON_H20
        SGLANG_DIFFUSION_TRITON_FAST_LAUNCH SGLANG_DISABLE_FUSED_AR_QUANT
        SGLANG_DISABLE_LFM_FUSED_CONV SGLANG_DISABLE_SILU_FP4_QUANT_FUSION
        SGLANG_DSV4_GROUPED_ASM SGLANG_FA4_TMEM_LOAD_RED_MAX
        SGLANG_FLASHINFER_USE_TENSOR_CORE SGLANG_FUSED_MLA_ENABLE_ROPE_FUSION
        SGLANG_GDN_CHUNK_H_BV SGLANG_GDN_CHUNK_H_NUM_STAGES SGLANG_GDN_CHUNK_H_NUM_WARPS
        SGLANG_GDN_QKVZ_BA_ALT_STREAM SGLANG_MINIMAX_NPU_PREFILL_MAIN_BPS
        SGLANG_MOE_SHUFFLE_GFX1250 SGLANG_MXFP4_USE_OFFICIAL_SHUFFLE
        SGLANG_QK_NORM_ALT_STREAM SGLANG_QK_RMSNORM_TORCH SGLANG_QWEN35_PACKED_IN_PROJ
        SGLANG_ROCM_K3_KDA_FUSED_BACKEND SGLANG_ROCM_KDA_HIP_PREFILL
        SGLANG_ROCM_SMALLM_FP8_BS SGLANG_TORCH_COMPILE_MODE SGLANG_TORCH_DYNAMIC_SHAPE
        SGLANG_USE_FUSED_PARALLEL_QKNORM TIMM_FUSED_ATTN TRTLLM_DISABLE_FP4_QUANT_FAST_MATH
        TRTLLM_ENABLE_PDL
    """,
    "Where experts lie, and how often: each token goes to the same ones.": """
        SGLANG_EXPERT_LOCATION_UPDATER_LOG_INPUT SGLANG_EXPERT_LOCATION_UPDATER_CANARY
        SGLANG_EXPERT_LOCATION_UPDATER_LOG_METRICS SGLANG_LOG_EXPERT_LOCATION_METADATA
        SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR SGLANG_EPLB_HEATMAP_COLLECTION_INTERVAL
        SGLANG_EPLB_P2P_BATCH_CHUNK_SIZE
    """,
    "Where compiled kernels are kept, and how they are built.": """
        SGLANG_CACHE_DIR SGLANG_CUTE_AOT_CACHE_DIR SGLANG_JIT_CACHE_DIR
        SGLANG_JIT_CACHE_DEBUG SGLANG_JIT_CACHE_KEEP SGLANG_JIT_FORCE_RECOMPILE
        SGLANG_CRASH_ON_JIT_COMPILE SGLANG_JIT_LOG_RESOURCE_USAGE
        SGLANG_JIT_BENCHMARK_DISABLE_LOG_BANDWIDTH SGLANG_JIT_BENCHMARK_DISABLE_LOG_FLOPS
        SGLANG_SAIL_GPU_ARCH SGLANG_LORA_MOE_CONFIG_DIR SGLANG_LORA_DENSE_CONFIG_DIR
        CUDA_DEVICE_MAX_CONNECTIONS CUDA_HOME CUDA_PATH CUTE_DSL_ARCH CUTE_DSL_DUMP_DIR
        CUTE_DSL_KEEP_CUBIN CUTE_DSL_KEEP_PTX CUTE_DSL_LOG_LEVEL CUTE_DSL_LOG_TO_CONSOLE
        CUTE_DSL_PTXAS_PATH CUTE_DSL_PTXAS_VERBOSE CXX DG_JIT_CACHE_DIR DG_JIT_USE_NVRTC
        FLASHINFER_CUDA_ARCH_LIST FLASHINFER_DISABLE_VERSION_CHECK FLASH_ATTENTION_ARCH
        GPU_ARCHS GPU_PINNED_MIN_XFER_SIZE MATHDX_HOME MAX_JOBS PPU_HOME PPU_SDK
        PYTORCH_ROCM_ARCH ROCM_HOME ROCM_PATH SGLANG_K3_FLYDSL_SOURCE
        TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR TRITON_CACHE_DIR
    """,
    "Of the output layer, of sampling or of what a request returns, which no page holds.": """
        SGLANG_RETURN_ORIGINAL_LOGPROB SGLANG_SANITIZE_NAN_LOGITS
        SGLANG_ENABLE_LOGPROB_CHUNK SGLANG_LOGPROB_CHUNK_SIZE
        SGLANG_ENABLE_FAST_INPUT_LOGPROBS SGLANG_DISABLE_AITER_GREEDY_SAMPLE
    """,
    "Where and by how many workers pictures are read and kept before they are "
    "computed on, and how their names are made.": """
        SGLANG_VLM_CACHE_SIZE_MB SGLANG_MM_BUFFER_SIZE_MB SGLANG_MM_PRECOMPUTE_HASH
        SGLANG_VIT_ENABLE_CUDA_GRAPH SGLANG_VIT_ENABLE_VECTORIZED_POS_EMBED
        SGLANG_MM_SKIP_COMPUTE_HASH SGLANG_MM_AVOID_RETOKENIZE SGLANG_USE_CUDA_IPC_TRANSPORT
        SGLANG_USE_IPC_POOL_HANDLE_CACHE SGLANG_MM_FEATURE_CACHE_MB
        SGLANG_MM_ITEM_MEM_POOL_RECYCLE_INTERVAL_SEC SGLANG_ENCODER_GRPC_TIMEOUT_SECS
        SGLANG_ENCODER_MM_RECEIVER_MODE SGLANG_ENCODER_RECV_TIMEOUT
        SGLANG_ENCODER_SEND_TIMEOUT SGLANG_ENCODER_HTTP_TIMEOUT SGLANG_ENCODER_REQ_TIMEOUT
        SGLANG_ENCODER_DISPATCH_MIN_ITEMS SGLANG_ENCODER_MAX_BATCH_SIZE
        SGLANG_ENCODER_PREPROC_WORKERS SGLANG_ENCODER_MM_LOAD_WORKERS
        SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL
        SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT SGLANG_ENCODER_BOOTSTRAP_EVICTED_TTL
        SGLANG_EMBEDDING_POOL_SIZE_MB SGLANG_ENCODER_DP_WORKER_MAX_INFLIGHT REQUEST_TIMEOUT
        SGLANG_CPU_WORKERS SGLANG_ENCODER_VIDEO_DECODE_NUM_THREADS SGLANG_IO_WORKERS
        SGLANG_MM_LOAD_MAX_RETRIES
    """,
    "Which packages are loaded into SGLang. No digest covers their code: see "
    "docs/manual/security.md.": """
        SGLANG_PLATFORM SGLANG_PLUGINS
    """,
}
"""The same of environment variables."""
