"""Speculation through the whole service: the same ids as without, and its metrics."""
import concurrent.futures

import pytest

from harness import MODELS, SMOLLM2

TINY = MODELS / "tiny-qwen3"
OFF = ("--max-draft-tokens=0",)
FREE = "--test-free-drafts"  # else a busy machine may find that drafts do not pay
KINDS = {
    "look-up": (FREE,),
    "draft model": (FREE, f"--draft-model={MODELS / 'tiny-qwen3-draft'}"),
    "low-bit copy": (FREE, "--draft-weight-dtype=q4"),
    "one at a time": (FREE, "--draft-weight-dtype=q4", "--max-draft-tokens=1", "--no-ngram-drafts"),
    "as measured": ("--draft-weight-dtype=q4",),
}
PROMPTS = ["And it came to pass in those days", "In the beginning God created the heaven and the earth. In the beginning God",
           "The LORD is my shepherd; I shall not want.", "Now these are the names of the children of Israel"]


def requests_of(service):
    made = []
    for number, prompt in enumerate(PROMPTS):
        for temperature in (0, 0.7, 1.3):
            made.append(service.request(prompt, sampling={
                "temperature": temperature, "seed": 11 + number, "max_tokens": 48, "n": 1 + number % 2,
                "repetition_penalty": 1.0 + 0.1 * (number % 2), "logprobs": 2}))
    return made


def answers(service, together):
    def run(request):
        answer = service.stream(request)
        return ([answer.ids(i) for i in range(request.sampling.n)], [answer.reason(i) for i in range(request.sampling.n)],
                [[entry.SerializeToString() for entry in answer.logprobs[i]] for i in range(request.sampling.n)])

    with concurrent.futures.ThreadPoolExecutor(8 if together else 1) as threads:
        return list(threads.map(run, requests_of(service)))


# Cases 6.1, 6.2, 12.3, 12.4
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_plain_decoding(pool, kind):
    plain = pool.get(TINY, decode_flags=OFF)
    expected = answers(plain, together=False)
    plain.wait_idle()
    assert plain.decode[0].metric("baton_spec_decode_draft_tokens_total") == 0
    drafting = pool.get(TINY, decode_flags=KINDS[kind])
    for together in (False, True):
        assert answers(drafting, together) == expected
    drafting.wait_idle()


def test_metrics_tell_what_became_of_the_drafts(pool):
    service = pool.get(TINY, decode_flags=KINDS["low-bit copy"])
    worker = service.decode[0]
    names = [f"baton_spec_decode_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    before = [worker.metric(name) for name in names]
    answer = service.stream(service.request(PROMPTS[0], sampling={"temperature": 0, "max_tokens": 120, "ignore_eos": True}))
    service.wait_idle()
    rows, drafts, accepted = (worker.metric(name) - old for name, old in zip(names, before))
    assert 0 < rows <= drafts <= 15 * rows and 0 < accepted <= drafts
    per_position = [worker.metric("baton_spec_decode_accepted_tokens_per_pos_total", position=i) for i in range(15)]
    assert sum(per_position) == worker.metric("baton_spec_decode_accepted_tokens_total")
    assert per_position == sorted(per_position, reverse=True)
    assert answer.timings.accept_length > 1.0


def test_smollm2_copies_its_input_in_fewer_steps(pool):
    text = ("The night train leaves the capital at ten minutes past nine and reaches the coast at a quarter to seven in the "
            "morning. Passengers with bicycles must reserve a place, since the luggage van takes no more than twelve.")
    prompt = f"<|im_start|>user\nRepeat this text word for word:\n\n{text}<|im_end|>\n<|im_start|>assistant\n{text[:60]}"
    plain, drafting = pool.get(SMOLLM2, decode_flags=OFF), pool.get(SMOLLM2, decode_flags=(FREE,))
    sampling = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    runs = [service.stream(service.request(prompt, parse_special=True, sampling=sampling)) for service in (plain, drafting)]
    assert runs[0].ids() == runs[1].ids()
    # The first token comes from prefill and takes no step of decode.
    tokens = len(runs[0].ids())
    assert runs[0].timings.accept_length == pytest.approx(tokens / (tokens - 1))
    assert runs[1].timings.accept_length > 1.2 * runs[0].timings.accept_length


# The prefill worker computes the draft model's KV too and hands it over; where it does not, the decode worker does.
@pytest.mark.parametrize("shipped", [True, False])
def test_the_draft_models_kv_is_handed_over_or_computed(pool, shipped):
    flag = KINDS["draft model"]
    model = flag[1:]
    plain = pool.get(TINY, decode_flags=OFF)
    # Steps take a while, so that the KV comes before the answer has ended.
    service = pool.get(TINY, decode_flags=flag + ("--no-ngram-drafts", "--test-step-delay=5ms"),
                       prefill_flags=model if shipped else ())
    ids = [7 + 13 * i % 1900 for i in range(500)]
    sampling = {"temperature": 0, "max_tokens": 800, "ignore_eos": True}
    answer = service.stream(service.request(ids=ids, sampling=sampling))
    assert answer.ids() == plain.stream(plain.request(ids=ids, sampling=sampling)).ids()
    service.wait_idle()
    worker = service.decode[0]
    came = worker.metric("baton_spec_decode_draft_prompt_tokens_total", source="transferred")
    assert came == (448 if shipped else 0)
    computed = worker.metric("baton_spec_decode_draft_prompt_tokens_total", source="computed")
    assert shipped or computed > 448
    assert worker.metric("baton_spec_decode_accepted_tokens_total") > 50


@pytest.mark.parametrize("flag,named", [
    ("--max-draft-tokens=16", "max-draft-tokens"), ("--max-draft-tokens=-1", "max-draft-tokens"),
    ("--draft-weight-dtype=int3", "int8"), ("--draft-model=/nowhere", "/nowhere"), ("--swap-space=-1", "swap-space"),
    (f"--draft-model={MODELS / 'chain-draft'}", "draft-model"),
])
def test_a_draft_setting_that_cannot_work_stops_the_start(flag, named):
    import subprocess

    from harness import BIN, SLOWNESS
    run = subprocess.run([BIN / "baton-decode", f"--model={TINY}", "--listen=127.0.0.1:0", "--http-port=0", flag],
                         capture_output=True, text=True, timeout=60 * SLOWNESS)
    assert run.returncode > 0 and named in run.stdout + run.stderr, run.stderr


# Case 14.2 in real processes: a pool for about three, twelve long answers, with and without swap.
@pytest.mark.parametrize("swap", ["--swap-space=0", "--swap-space=67108864"])
def test_kv_pressure_sends_no_token_twice(pool, swap):
    roomy = pool.get(TINY, decode_flags=OFF)
    sampling = {"temperature": 0.9, "max_tokens": 200, "ignore_eos": True}
    requests = [roomy.request(PROMPTS[i % 4] + " " + "ab" * i, sampling={**sampling, "seed": i}) for i in range(12)]
    solo = [roomy.stream(request).ids() for request in requests]
    roomy.wait_idle()
    tight = pool.get(TINY, "single", kv_blocks=16, decode_flags=(swap, "--max-model-len=512"))
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        together = list(threads.map(lambda request: tight.stream(request, timeout=120).ids(), requests))
    assert together == solo
    assert tight.decode[0].metric("baton_preemptions_total") > 0
    tight.wait_idle()
