#pragma once

// Every metric of the project: X(Id, name, roles, labels, [buckets,] help). Included by metrics.h
// only.
//   roles   the processes that export it
//   labels  "a=x|y b": label a takes x or y, label b is open. Where all labels are closed the
//   series exist from the
//           start, so that rates and alerts see the first event. "" is a metric without labels of
//           its own.
//   buckets names a list in metrics.cc
// Every series also carries the constant labels model_name and role.

// clang-format off
#define BATON_COUNTERS(X)                                                                         \
  /* Requests inside a worker. */                                                                 \
  X(PromptTokens, "baton_prompt_tokens_total", kWorkers, "source=computed|cached|transferred",    \
    "Prompt tokens by where their KV came from.")                                                 \
  X(GenerationTokens, "baton_generation_tokens_total", kAll, "",                                  \
    "Tokens generated; in the router: received for clients.")                                     \
  X(RequestsFinished, "baton_requests_finished_total", kWorkers,                                  \
    "finished_reason=stop|length|tool_calls|abort|error",                                         \
    "Requests that ended in this worker, by reason; each counts once.")                           \
  X(PrefixCacheQueries, "baton_prefix_cache_queries_total", kWorkers, "",                         \
    "Prompt tokens looked up in the prefix cache.")                                               \
  X(PrefixCacheHits, "baton_prefix_cache_hits_total", kWorkers, "",                               \
    "Prompt tokens found in the prefix cache.")                                                   \
  X(PrefixCacheEvictions, "baton_prefix_cache_evictions_total", kWorkers, "",                     \
    "Blocks that left the prefix cache to make room.")                                            \
  X(Preemptions, "baton_preemptions_total", kWorkers, "",                                         \
    "Sequences put back for want of KV blocks.")                                                  \
  X(NanLogits, "baton_nan_logits_total", kWorkers, "",                                            \
    "Requests that ended because their logits were not finite.")                                  \
  X(KvFp8Saturated, "baton_kv_fp8_saturated_total", kWorkers, "tensor=k|v",                       \
    "Sampled K and V values beyond the range of e4m3.")                                           \
  X(SampledRows, "baton_sampled_rows_total", kWorkers, "place=device|host",                       \
    "Rows of logits that tokens were drawn from: on the device, or moved to the host.")           \
  /* Speculation. */                                                                              \
  X(SpecDecodeDrafts, "baton_spec_decode_drafts_total", kDecode, "",                              \
    "Rows of draft tokens that a step has verified, one a sequence.")                             \
  X(SpecDecodeDraftTokens, "baton_spec_decode_draft_tokens_total", kDecode, "",                   \
    "Draft tokens verified.")                                                                     \
  X(SpecDecodeAcceptedTokens, "baton_spec_decode_accepted_tokens_total", kDecode, "",             \
    "Draft tokens that were what the model says.")                                                \
  X(SpecDecodeAcceptedTokensPerPos, "baton_spec_decode_accepted_tokens_per_pos_total", kDecode,   \
    "position",                                                                                   \
    "Accepted draft tokens by their place in the row of drafts, from 0.")                         \
  X(SpecDecodeDraftPromptTokens, "baton_spec_decode_draft_prompt_tokens_total", kDecode,          \
    "source=computed|transferred",                                                                \
    "Tokens in the draft model's cache that it did not draft, by where their KV came from.")      \
  /* Hand-over. */                                                                                \
  X(KvTransferUnitsSkipped, "baton_kv_transfer_units_skipped_total", kPrefill, "reason=prefix",   \
    "Blocks that were not sent because the decode worker held them.")                             \
  X(KvTransferFailures, "baton_kv_transfer_failures_total", kWorkers,                             \
    "transport=cuda_ipc|nccl|shm|tcp reason=abort|checksum|peer_gone|stall|error",                         \
    "Hand-overs that failed.")                                                                    \
  X(KvTransportFallback, "baton_kv_transport_fallback_total", kPrefill, "from to reason",         \
    "Meetings with a decode worker that took another transport than the best one that both might "\
    "have; reason: not_offered, unreachable, refused or error.")                                  \
  X(KvReservationExpired, "baton_kv_reservation_expired_total", kDecode, "",                      \
    "Reservations whose deadline passed before the KV landed.")                                   \
  /* Router. */                                                                                   \
  X(RouterRequests, "baton_router_requests_total", kRouter,                                       \
    "protocol=grpc|http method=generate|generate_unary code",                                     \
    "Requests received, each counted once when it ended, by status code.")                        \
  X(RouterDecisions, "baton_router_decisions_total", kRouter,                                     \
    "decision=prefill-decode|decode-only|prefill-only",                                           \
    "Where requests were sent.")                                                                  \
  X(RouterRetries, "baton_router_retries_total", kRouter,                                         \
    "reason=exhausted|unavailable|data_loss",                                                     \
    "Further attempts at a request, by what ended the attempt before.")                           \
  X(RouterRejected, "baton_router_rejected_total", kRouter,                                       \
    "reason=invalid|queue_full|late|deadline|draining|no_worker|unknown_model|unauthenticated|"   \
    "token_limit",                                                                                \
    "Requests that were never dispatched, by reason; late: a first token that was predicted to "  \
    "come too late.")                                                                             \
  X(RouterSloMet, "baton_router_slo_met_total", kRouter, "slo=ttft|tpot",                         \
    "Finished requests that met the objective.")                                                  \
  X(RouterSloMissed, "baton_router_slo_missed_total", kRouter, "slo=ttft|tpot",                   \
    "Finished requests that missed the objective.")                                               \
  /* gRPC server, the names of the go-grpc-prometheus family, so that known dashboards work. */   \
  X(GrpcServerStarted, "grpc_server_started_total", kAll, "grpc_type grpc_service grpc_method",   \
    "RPCs started on the server.")                                                                \
  X(GrpcServerHandled, "grpc_server_handled_total", kAll,                                         \
    "grpc_type grpc_service grpc_method grpc_code",                                               \
    "RPCs completed on the server, whatever the outcome.")                                        \
  X(GrpcServerMsgReceived, "grpc_server_msg_received_total", kAll,                                \
    "grpc_type grpc_service grpc_method",                                                         \
    "Messages received on the server.")                                                           \
  X(GrpcServerMsgSent, "grpc_server_msg_sent_total", kAll, "grpc_type grpc_service grpc_method",  \
    "Messages sent by the server.")

#define BATON_GAUGES(X)                                                                           \
  X(BuildInfo, "baton_build_info", kAll, "version commit backend cuda",                           \
    "1; what is running.")                                                                        \
  X(WorkerState, "baton_worker_state", kWorkers, "state=loading|ready|draining",                  \
    "1 for the state the worker is in.")                                                          \
  X(ModelLoadSeconds, "baton_model_load_seconds", kWorkers, "",                                   \
    "Time from start until the model was loaded and warm.")                                       \
  X(RequestsRunning, "baton_requests_running", kWorkers, "",                                      \
    "Requests that are being computed.")                                                          \
  X(RequestsWaiting, "baton_requests_waiting", kWorkers, "",                                      \
    "Requests that wait to be computed.")                                                         \
  X(RequestsWaitingByReason, "baton_requests_waiting_by_reason", kWorkers,                        \
    "reason=capacity|kv_blocks|kv_transfer|grammar",                                              \
    "Requests that wait to be computed, by what they wait for.")                                  \
  X(QueueTokens, "baton_queue_tokens", kWorkers, "",                                              \
    "Prompt tokens accepted and not computed yet.")                                               \
  X(KvCacheUsageRatio, "baton_kv_cache_usage_ratio", kWorkers, "",                                \
    "Share of the KV blocks in use, 0 to 1; blocks held by the prefix cache alone are free.")     \
  X(KvCacheInfo, "baton_kv_cache_info", kWorkers, "block_size num_blocks kv_dtype block_bytes",   \
    "1; shape of the KV cache.")                                                                  \
  X(KvBlocks, "baton_kv_blocks", kWorkers, "state=free|cached|active|reserved|quarantined",       \
    "KV blocks by state; they add up to the pool.")                                               \
  X(GpuMemoryUsed, "baton_gpu_memory_used_bytes", kWorkers, "gpu",                                \
    "Memory in use on the worker's GPU, by all processes.")                                       \
  X(GpuUtilization, "baton_gpu_utilization_ratio", kWorkers, "gpu",                               \
    "Share of the last moments in which the GPU ran a kernel, 0 to 1.")                           \
  X(GpuMemoryBandwidth, "baton_gpu_memory_bandwidth_ratio", kWorkers, "gpu",                      \
    "Share of the last moments in which the GPU's memory was read or written, 0 to 1.")           \
  X(GpuPower, "baton_gpu_power_watts", kWorkers, "gpu",                                           \
    "Power that the worker's GPU draws.")                                                         \
  X(KvTransferRequests, "baton_kv_transfer_requests", kWorkers,                                   \
    "stage=prealloc|inflight|waiting_prefill",                                                    \
    "Hand-overs in progress, by stage.")                                                          \
  X(KvTransportSelected, "baton_kv_transport_selected", kWorkers, "transport peer",               \
    "1; the transport in use to a peer.")                                                         \
  X(KvTransportProbe, "baton_kv_transport_probe_bytes_per_second", kWorkers, "transport peer",    \
    "Speed of the probe copy made when the peers met.")                                           \
  X(RouterRequestsInFlight, "baton_router_requests_in_flight", kRouter, "",                       \
    "Generate calls received and not ended.")                                                     \
  X(RouterQueueDepth, "baton_router_queue_depth", kRouter,                                        \
    "priority=high|normal|low",                                                                   \
    "Requests that wait for room on workers.")                                                    \
  X(RouterWorkers, "baton_router_workers", kRouter,                                               \
    "worker_role=prefill|decode state=ready|suspect|loading|draining|down",                       \
    "Workers by state; suspect: connected, but silent.")                                          \
  X(RouterWorkerBreakerState, "baton_router_worker_breaker_state", kRouter, "worker",             \
    "0 closed, 1 half-open, 2 open: how far requests are kept away from a worker that failed.")   \
  X(RouterPrefixHitRatio, "baton_router_prefix_hit_ratio", kRouter, "",                           \
    "Share of all prompts' full blocks that the chosen worker was known to hold, since the start.")

#define BATON_HISTOGRAMS(X)                                                                       \
  /* Requests inside a worker. */                                                                 \
  X(TimeToFirstToken, "baton_time_to_first_token_seconds", kWorkers, "", kTtft,                   \
    "From arrival in this worker to its first token.")                                            \
  X(InterTokenLatency, "baton_inter_token_latency_seconds", kWorkers, "", kItl,                   \
    "Between two tokens of a request.")                                                           \
  X(RequestTimePerOutputToken, "baton_request_time_per_output_token_seconds", kWorkers, "", kItl, \
    "Mean time between the tokens of a finished request.")                                        \
  X(E2eRequestLatency, "baton_e2e_request_latency_seconds", kWorkers, "", kPhase,                 \
    "From arrival in this worker to the end.")                                                    \
  X(RequestQueueTime, "baton_request_queue_time_seconds", kWorkers, "", kPhase,                   \
    "From arrival to the first step.")                                                            \
  X(RequestPrefillTime, "baton_request_prefill_time_seconds", kWorkers, "", kPhase,               \
    "From the first step to the first token.")                                                    \
  X(RequestDecodeTime, "baton_request_decode_time_seconds", kWorkers, "", kPhase,                 \
    "From the first token to the last.")                                                          \
  X(RequestInferenceTime, "baton_request_inference_time_seconds", kWorkers, "", kPhase,           \
    "From the first step to the last token.")                                                     \
  X(RequestPromptTokens, "baton_request_prompt_tokens", kWorkers, "", kTokens,                    \
    "Prompt tokens of a request.")                                                                \
  X(RequestGenerationTokens, "baton_request_generation_tokens", kWorkers, "", kTokens,            \
    "Tokens generated for a request.")                                                            \
  X(RequestParamsMaxTokens, "baton_request_params_max_tokens", kWorkers, "", kTokens,             \
    "max_tokens of a request.")                                                                   \
  X(IterationTokens, "baton_iteration_tokens", kWorkers, "", kTokens,                             \
    "Tokens in one step.")                                                                        \
  X(IterationDuration, "baton_iteration_duration_seconds", kWorkers,                              \
    "phase=prefill|decode|draft|verify|mixed",                                                    \
    kItl,                                                                                         \
    "Duration of one step.")                                                                      \
  X(StepGap, "baton_step_gap_seconds", kWorkers, "", kFine,                                       \
    "Between two steps with work: planning, drafting, drawing, sending.")                            \
  X(SpecDecodeAcceptLength, "baton_spec_decode_accept_length", kDecode, "", kAcceptLength,        \
    "Tokens that a step with drafts has given one sequence: the accepted ones and one more.")     \
  X(KvAppend, "baton_kv_append_seconds", kWorkers, "", kFine,                                     \
    "Time of a request's prefill spent in the append kernel, where the backend measures it.")     \
  /* Hand-over. */                                                                                \
  X(KvAbortToFree, "baton_kv_abort_to_free_seconds", kWorkers, "", kPhase,                        \
    "From the abort of a request until its KV blocks were free.")                                 \
  X(KvQuarantine, "baton_kv_quarantine_seconds", kDecode, "", kPhase,                             \
    "Time blocks spent waiting for their writer to be quiet.")                                    \
  X(KvTransferDuration, "baton_kv_transfer_duration_seconds", kWorkers,                           \
    "transport=cuda_ipc|nccl|shm|tcp direction=send|recv",                                                 \
    kTransferSeconds,                                                                             \
    "From a hand-over's first byte to its last.")                                                 \
  X(KvTransferBytes, "baton_kv_transfer_bytes", kWorkers,                                         \
    "transport=cuda_ipc|nccl|shm|tcp direction=send|recv",                                                 \
    kBytes,                                                                                       \
    "KV bytes of one hand-over.")                                                                 \
  X(KvTransferExposed, "baton_kv_transfer_exposed_seconds", kDecode, "", kTransferSeconds,        \
    "Time decode waited for KV that compute did not hide.")                                       \
  /* Router. */                                                                                   \
  X(RouterRequestDuration, "baton_router_request_duration_seconds", kRouter,                      \
    "method=generate|generate_unary",                                                             \
    kPhase,                                                                                       \
    "From reception of a request to its end.")                                                    \
  X(RouterTimeToFirstToken, "baton_router_time_to_first_token_seconds", kRouter,                  \
    "method=generate|generate_unary",                                                             \
    kTtft,                                                                                        \
    "From reception of a request until its first token was there for the client: the true TTFT.") \
  X(RouterInterTokenLatency, "baton_router_inter_token_latency_seconds", kRouter,                 \
    "method=generate|generate_unary",                                                             \
    kItl,                                                                                         \
    "Between two tokens of an answer as they reach the router.")                                  \
  X(RouterQueueTime, "baton_router_queue_time_seconds", kRouter, "", kPhase,                      \
    "Time a request waited for a place.")                                                         \
  X(RouterTtftStage, "baton_router_ttft_stage_seconds", kRouter,                                  \
    "stage=tokenize|queue|reserve|prefill|prefill_queue|prefill_compute|append|forward|"          \
    "handover|first_decode",                                                                      \
    kFine,                                                                                        \
    "Parts of the time to first token; handover and first_decode follow it. prefill_* and "       \
    "append are parts of prefill.")                                                               \
  X(RouterTtftPredictionError, "baton_router_ttft_prediction_error_seconds", kRouter, "", kTtft,  \
    "Distance between the predicted and the measured time from dispatch to first token.")         \
  X(RouterOverhead, "baton_router_overhead_seconds", kRouter, "stage=dispatch|forward|total",     \
    kOverhead,                                                                                    \
    "The router's own time. dispatch: from reception until the workers were called, without the " \
    "wait for room. forward: from a message of a worker until it was given to the client's "      \
    "stream. total: dispatch and the mean forward of one request.")                               \
  X(RouterDecisionDuration, "baton_router_decision_duration_seconds", kRouter, "", kFine,         \
    "Time to choose workers.")                                                                    \
  X(RouterTokenize, "baton_router_tokenize_seconds", kRouter, "", kFine,                          \
    "Time to render and encode a prompt.")                                                        \
  X(RouterDetokenize, "baton_router_detokenize_seconds", kRouter, "", kFine,                      \
    "Time spent making text over one answer.")                                                    \
  X(GrpcServerHandling, "grpc_server_handling_seconds", kAll,                                     \
    "grpc_type grpc_service grpc_method",                                                         \
    kPhase,                                                                                       \
    "Duration of RPCs on the server.")
// clang-format on
