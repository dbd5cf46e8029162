#!/usr/bin/env python3
"""Breaks the project's code on purpose, one rule at a time, and lets the simulation look for it.

  tests/sim/mutate.py [--build build] [--seeds 3000] [NAME...]

Works on a copy of the sources (under --build), so nothing here changes. A mutation that no seed
finds is a hole in the simulation, or a rule that another rule covers: EXPECTED_SILENT says which and
why. Prints one line a mutation and fails when one behaves otherwise than expected.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# name: (file, text, replacement). The text occurs once.
MUTATIONS = {
    "free_blocks_at_revoke": (
        "decode_worker/reservation_table.cc",
        "  memory_.pool().Quarantine(promise.missing);",
        "  memory_.pool().Release(promise.missing); return memory_.pool().Release(promise.headroom);",
    ),
    "revoke_is_quiet_at_once": (
        "kvtransfer/receiver_table.cc",
        "  if (!entry->peer_quiet || entry->unit_open) return;",
        "  if (entry->unit_open) return;",
    ),
    "forget_the_open_unit": (
        "kvtransfer/receiver_table.cc",
        "  if (!entry->peer_quiet || entry->unit_open) return;",
        "  if (!entry->peer_quiet) return;",
    ),
    "quiesced_before_the_last_write": (
        "kvtransfer/sender_table.cc",
        "  if (writing_ != id) Finish(id);",
        "  Finish(id);",
    ),
    "commit_does_not_wait_for_units": (
        "kvtransfer/receiver_table.cc",
        "  if (entry->units < commit.units_sent()) return;  // the control channel was faster",
        "",
    ),
    "accept_a_late_unit": (
        "kvtransfer/receiver_table.cc",
        "  if (entry == nullptr || entry->session != session || entry->ending ||\n"
        "      entry->reservation.epoch != unit.epoch) {",
        "  if (entry == nullptr || entry->session != session) {",
    ),
    "commit_before_the_last_unit": (
        "kvtransfer/sender_table.cc",
        "      !transfer->pending.empty() || writing_ == id) {",
        "      !transfer->pending.empty()) {",
    ),
    "session_gone_is_proof": (
        "kvtransfer/receiver_core.cc",
        "    if (line != nullptr && line->listener().peer_writes()) {",
        "    if (false && line != nullptr) {",
    ),
    "skip_all_incarnation_checks": (
        "kvtransfer/sender_table.cc",
        "  if (spec.handoff.decode_incarnation() != peer_incarnation_) {",
        "  if (false) {",
    ),
    "stale_session_for_a_restarted_worker": (
        "prefill_worker/peer_table.cc",
        "  if (!peer.opening && peer.Stands() && peer.session.incarnation == incarnation) {",
        "  if (!peer.opening && peer.session.sender != nullptr) {",
    ),
    "resend_tokens_on_resume": (
        "router/generate_call_legs.cc",
        "    spec.set_resumed_tokens(sent);",
        "    spec.clear_prompt_ids(); spec.mutable_prompt_ids()->Add(prompt_ids_.begin(), "
        "prompt_ids_.end());",
    ),
    "accept_a_position_twice": (
        "router/answer_text.cc",
        "  if (finished_ || token.position() < next_position_) return false;",
        "  if (finished_) return false;\n"
        "  if (token.position() < next_position_) next_position_ = token.position();",
    ),
    "ship_partial_block_short": (
        "kvtransfer/transfer_plan.h",
        "    return left < kv::kBlockTokens ? left : kv::kBlockTokens;",
        "    return left < kv::kBlockTokens && left > 1 ? left - 1 : kv::kBlockTokens;",
    ),
    "late_ticket_forgets_cached_blocks": (
        "prefill_worker/kv_shipper.cc",
        "  PushFinished(&found->second, sequence, chunk.block_begin);",
        "",
    ),
    "prefill_frees_what_is_being_sent": (
        "prefill_worker/prefill_loop.cc",
        "  if (shipper_.IsOpen(call->id)) return;",
        "",
    ),
    "preempted_answer_starts_again": (
        "decode_worker/decode_scheduler.cc",
        "  if (slots.empty()) return AddPreempted(sequence);",
        "  sequence->tokens.pop_back();\n  if (slots.empty()) return AddPreempted(sequence);",
    ),
    "full_worker_is_never_asked_again": (
        "router/generate_call_legs.cc",
        "    return Resubmit(*old);\n  }\n  last_failure_",
        "    return;\n  }\n  last_failure_",
    ),
    "cancel_leaks_the_place": (
        "router/generate_call.cc",
        "  if (has_place_) deps_.admission->Leave();\n  has_place_ = false;",
        "  if (has_place_ && !absl::IsCancelled(status)) deps_.admission->Leave();\n"
        "  has_place_ = false;",
    ),
    "lost_worker_is_not_retried": (
        "router/generate_call_legs.cc",
        "  if (++old->failures > deps_.max_retries) return",
        "  if (true) return",
    ),
    "finished_choice_keeps_its_decode_worker": (
        "router/generate_call.cc",
        "  if (AllFinished(*attempt) && attempt->decode_open && !DecodeKnowsTheEnd(*attempt))",
        "  if (false)",
    ),
    "what_a_worker_says_of_its_peer_is_final": (
        "router/blame.cc",
        "absl::IsFailedPrecondition(status) || AccusesPeer(status);",
        "absl::IsFailedPrecondition(status);",
    ),
    "headroom_leaks_at_landing": (
        "decode_worker/reservation_table.cc",
        "  memory_.pool().Release(promise.headroom);\n  prompt->blocks = promise.blocks;",
        "  prompt->blocks = promise.blocks;",
    ),
    "checksum_not_compared": (
        "kvtransfer/data_connection.cc",
        "      if (checksum.ok() && *checksum != unit_->checksum) {",
        "      if (false) {",
    ),
    "damaged_frame_believed": (
        "kvtransfer/frame_reader.cc",
        "  if (HeaderField<uint32_t>(header + 12) != FrameCheck(header, frame_.body))",
        "  if (false)",
    ),
    "quarantine_never_times_out": (
        "kvtransfer/receiver_core.cc",
        "    restless = table_.Restless(now, kQuietTimeout);",
        "",
    ),
    "silent_peer_kept": (
        "kvtransfer/receiver_core.cc",
        "      if (++session.unheard > kMissedHeartbeatsMax) silent.push_back(id);",
        "",
    ),
    "silent_worker_gets_work": (
        "router/route_policy.cc",
        "    } else if (worker.health == WorkerHealth::kSuspect || worker.tripped ||",
        "    } else if (worker.tripped ||",
    ),
    "failing_worker_gets_work": (
        "router/route_policy.cc",
        "    } else if (worker.health == WorkerHealth::kSuspect || worker.tripped ||",
        "    } else if (worker.health == WorkerHealth::kSuspect ||",
    ),
    "breaker_opens_for_good": (
        "router/breaker.h",
        "    until_ = now + pause_;",
        "    until_ = now + absl::Hours(1);",
    ),
    "failures_do_not_count": (
        "router/worker_table_place.cc",
        "    if (verdict == Verdict::kFailed && worker.known) worker.breaker.OnFailure(now);",
        "    if (verdict == Verdict::kFailed && worker.known) worker.breaker.OnNoVerdict();",
    ),
    "draining_worker_gets_work": (
        "router/worker_table.cc",
        "      return WorkerHealth::kDraining;",
        "      return WorkerHealth::kReady;",
    ),
    "slow_reader_holds_what_it_likes": (
        "engine/process/stream_writer.h",
        "      if (waiting_weight_ + weight > limit_ && !queue_.empty()) return WriteResult::kFull;",
        "",
    ),
    "slow_reader_is_refused_too_soon": (
        "engine/process/stream_writer.h",
        "    waiting_weight_ -= (front ? queue_.front() : queue_.back()).weight;",
        "",
    ),
    "slow_reader_loses_tokens": (
        "router/answer_merge.h",
        "  last->mutable_token_ids()->MergeFrom(next->token_ids());",
        "",
    ),
    "full_buffer_does_not_end_the_call": (
        "router/generate_call.cc",
        "    if (!written.ok()) return End(written);",
        "",
    ),
    "stopped_worker_forgets_its_calls": (
        "decode_worker/decode_loop.cc",
        '  for (Call* call : open) End(call, absl::UnavailableError("decode: worker stops"));',
        "",
    ),
}

# Rules that stand behind another rule: breaking one of them alone changes no answer.
EXPECTED_SILENT = {
    "skip_all_incarnation_checks": "PeerTable never hands a request the session of another instance",
}


def run(command, **kwargs):
    return subprocess.run(command, capture_output=True, text=True, errors="replace", **kwargs)


def mutate(copy, name):
    path, text, replacement = MUTATIONS[name]
    full = os.path.join(copy, path)
    with open(full) as file:
        source = file.read()
    if source.count(text) != 1:
        sys.exit(f"{name}: its text occurs {source.count(text)} times in {path}")
    with open(full, "w") as file:
        file.write(source.replace(text, replacement))
    return full, source


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--seeds", type=int, default=3000)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    names = options.names or list(MUTATIONS)
    # The copy has its build folder where the original has it, so that a compiler cache finds what it knows.
    src = os.path.join(os.path.abspath(options.build), "mutants")
    for entry in os.listdir(src) if os.path.isdir(src) else []:
        path = os.path.join(src, entry)
        if entry != "build":
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    tracked = run(["git", "ls-files", "-z"], cwd=ROOT, check=True).stdout.split("\0")
    for path in filter(None, tracked):
        if path.startswith(("docs/", "deploy/")) or not os.path.exists(os.path.join(ROOT, path)):
            continue
        os.makedirs(os.path.dirname(os.path.join(src, path)), exist_ok=True)
        shutil.copy2(os.path.join(ROOT, path), os.path.join(src, path))
    build = os.path.join(src, "build")
    run(["cmake", "-S", src, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBATON_CUDA=OFF",
         "-DBATON_UNITY=OFF"], check=True)  # one file changes at a time
    odd = 0
    for name in names:
        full, source = mutate(src, name)
        start = time.monotonic()
        made = run(["ninja", "-C", build, "-j1", "sim_cluster"])
        if made.returncode != 0:
            sys.exit(f"{name} does not compile:\n{made.stdout[-3000:]}")
        environment = dict(os.environ, BATON_SIM_SEEDS=str(options.seeds), BATON_SIM_FAILURES="1")
        looked = run([os.path.join(build, "tests/sim_cluster"), "--gtest_filter=*NothingIs*"],
                     env=environment)
        with open(full, "w") as file:
            file.write(source)
        os.utime(full)
        seen = re.search(r"seed (\d+)(: .*| died)", looked.stdout + looked.stderr)
        check = re.search(r"check failed: .*", looked.stdout + looked.stderr)
        what = "" if seen is None else seen.group(2).lstrip(": ")
        if check is not None:
            what = check.group(0)
        found = "not found" if seen is None else f"seed {seen.group(1)}: {what[:110]}"
        expected = (seen is None) == (name in EXPECTED_SILENT)
        odd += not expected
        note = EXPECTED_SILENT.get(name, "")
        print(f"{'ok ' if expected else 'ODD'} {name:38} {time.monotonic() - start:5.0f} s  {found} {note}",
              flush=True)
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main())
