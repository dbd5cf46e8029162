"""A second turn costs what is new in it: P computes what P lacks, sends what D lacks."""
from harness import MODELS

BLOCK = 64


def test_a_second_turn_computes_and_sends_only_what_is_new(pool):
    service = pool.get(MODELS / "tiny-qwen3")
    prefill, decode = service.prefill[0], service.decode[0]
    history = [3 + 29 * i % 1900 for i in range(700)]
    sampling = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
    first = service.stream(service.request(ids=history, sampling=sampling))
    service.wait_idle()
    per_token = first.timings.kv_bytes // len(history)
    second = history + first.ids() + [5 + 31 * i % 1900 for i in range(90)]
    computed = prefill.metric("baton_prompt_tokens_total", source="computed")
    hits = [worker.metric("baton_prefix_cache_hits_total") for worker in (prefill, decode)]
    again = service.stream(service.request(ids=second, sampling={**sampling, "max_tokens": 8}))
    service.wait_idle()
    # Prefill knows the first prompt, decode its answer too (but for the last token, which was never computed).
    known_to_prefill = len(history) // BLOCK * BLOCK
    known_to_decode = (len(history) + len(first.ids()) - 1) // BLOCK * BLOCK
    assert again.usage.cached_prompt_tokens == known_to_prefill
    assert prefill.metric("baton_prompt_tokens_total", source="computed") - computed == len(second) - known_to_prefill
    assert again.timings.kv_bytes == per_token * (len(second) - known_to_decode)
    assert prefill.metric("baton_prefix_cache_hits_total") - hits[0] == known_to_prefill
    assert decode.metric("baton_prefix_cache_hits_total") - hits[1] == known_to_decode
    # And it is the same answer as without any cache.
    unknown = service.stream(service.request(ids=second, cache_salt="elsewhere", sampling={**sampling, "max_tokens": 8}))
    assert unknown.ids() == again.ids()
    assert unknown.usage.cached_prompt_tokens == 0


def test_evictions_are_counted(pool):
    service = pool.get(MODELS / "tiny-qwen3", kv_blocks=24)
    for seed in range(4):
        ids = [3 + (29 + seed) * i % 1900 for i in range(600)]
        service.stream(service.request(ids=ids, sampling={"temperature": 0, "max_tokens": 4}))
    service.wait_idle()
    assert service.prefill[0].metric("baton_prefix_cache_evictions_total") > 0
