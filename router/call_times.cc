#include "router/call_times.h"

namespace baton::router {
namespace {

// Zero when one of the two never happened.
double Between(const std::optional<absl::Duration>& from, const std::optional<absl::Duration>& to) {
  return from.has_value() && to.has_value() ? absl::ToDoubleSeconds(*to - *from) : 0;
}

}  // namespace

void FillTimings(const CallTimes& times, absl::Duration now, v1::Timings* out) {
  out->set_tokenize_s(Between(times.received, times.encoded));
  out->set_queue_s(Between(times.encoded, times.admitted));
  out->set_prefill_s(Between(times.dispatched, times.first_computed));
  out->set_ttft_s(Between(times.received, times.first_written));
  out->set_e2e_s(Between(times.received, now));
  if (times.num_gaps > 0)
    out->set_itl_mean_s(absl::ToDoubleSeconds(times.gaps) / static_cast<double>(times.num_gaps));
  if (times.prefill.has_value()) {
    out->set_prefill_queue_s(times.prefill->queue_s());
    out->set_prefill_compute_s(times.prefill->compute_s());
    out->set_append_s(times.prefill->append_s());
  }
  if (times.prefill_done.has_value()) {
    out->set_kv_bytes(times.prefill_done->kv_bytes());
    out->set_kv_transport(times.prefill_done->transport());
  }
  if (!times.decode_done.has_value()) return;
  const worker::v1::DecodeResponse::Done& done = *times.decode_done;
  if (!times.prefill.has_value()) {
    out->set_prefill_queue_s(done.prefill_queue_s());
    out->set_prefill_compute_s(done.prefill_compute_s());
    out->set_append_s(done.append_s());
  }
  out->set_handover_exposed_s(done.handover_exposed_s());
  out->set_first_decode_s(done.first_decode_s());
  if (!times.prefill_done.has_value()) {  // it was late; both sides know these
    out->set_kv_bytes(done.kv_bytes());
    out->set_kv_transport(done.kv_transport());
  }
  if (done.steps() > 0) {
    out->set_accept_length(static_cast<float>(done.generated_tokens()) /
                           static_cast<float>(done.steps()));
  }
}

void ObserveTimes(const CallTimes& times, const std::string& method, const RouterMetrics& metrics) {
  if (!times.first_written.has_value()) return;
  v1::Timings timings;
  FillTimings(times, *times.first_written, &timings);
  metrics.TimeToFirstToken(method).Observe(timings.ttft_s());
  if (times.num_forwarded > 0) {
    metrics.overhead_total.Observe(
        absl::ToDoubleSeconds(times.dispatch_overhead +
                              times.forward_overhead / static_cast<double>(times.num_forwarded)));
  }
  metrics.Stage("queue").Observe(timings.queue_s());
  metrics.Stage("tokenize").Observe(timings.tokenize_s());
  metrics.Stage("prefill").Observe(timings.prefill_s());
  metrics.Stage("prefill_queue").Observe(timings.prefill_queue_s());
  metrics.Stage("prefill_compute").Observe(timings.prefill_compute_s());
  metrics.Stage("append").Observe(timings.append_s());
  metrics.Stage("forward").Observe(Between(times.first_computed, times.first_written));
  if (times.reserved.has_value())
    metrics.Stage("reserve").Observe(Between(times.dispatched, times.reserved));
  if (times.decode_done.has_value()) {
    metrics.Stage("handover").Observe(timings.handover_exposed_s());
    metrics.Stage("first_decode").Observe(timings.first_decode_s());
  }
  if (times.detokenize > absl::ZeroDuration())
    metrics.detokenize.Observe(absl::ToDoubleSeconds(times.detokenize));
}

}  // namespace baton::router
