"""What was prefilled here and decoded there must be what one process would have said."""
import concurrent.futures
import json
import random
import shutil
import time

import grpc
import pytest

import harness
from harness import MODELS, SMOLLM2, pb, status_of

BLOCK = 64
CHUNK = 512
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 1000]
SAMPLINGS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 42},
}
FORMATS = ["auto", "bf16", "f32", "fp8_dynamic"]


def prompt_ids(vocab, length, seed=1):
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def vocab_of(model):
    if model == SMOLLM2:
        return 49000
    return min(json.loads((model / "config.json").read_text())["vocab_size"], 256 if model.name.startswith("random-") else 1900)


def answers(service, model, lengths, max_tokens=12):
    """{(length, sampling): ids} from one service."""
    result = {}
    for length in lengths:
        for name, sampling in SAMPLINGS.items():
            request = service.request(ids=prompt_ids(vocab_of(model), length),
                                      sampling={**sampling, "max_tokens": max_tokens, "ignore_eos": True})
            answer = service.stream(request)
            assert answer.usage.prompt_tokens == length
            result[length, name] = answer.ids()
    return result


def compare_topologies(pool, model, lengths, **settings):
    pd = pool.get(model, "pd", **settings)
    split = answers(pd, model, lengths)
    pd.wait_idle()
    single = pool.get(model, "single", **settings)
    together = answers(single, model, lengths)
    single.wait_idle()
    assert split == together


# Case 11.8
def test_pd_ids_equal_single_process_ids_on_tiny_qwen3(pool):
    compare_topologies(pool, MODELS / "tiny-qwen3", LENGTHS)


def with_byte_tokenizer(model, directory):
    """A copy of a model that has weights only, with a tokenizer of 256 byte tokens: the service wants to show text."""
    copy = shutil.copytree(model, directory / model.name)
    tokenizer = json.loads((MODELS / "chain" / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])[:256]
    tokenizer["model"].update(vocab=dict(vocabulary), merges=[])
    tokenizer["added_tokens"] = []
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copy


# Case 11.8
@pytest.mark.parametrize("model", sorted(p.name for p in MODELS.glob("random-*")))
def test_pd_ids_equal_single_process_ids_on_random_models(pool, tmp_path, model):
    path = with_byte_tokenizer(MODELS / model, tmp_path)
    context = json.loads((path / "config.json").read_text())["max_position_embeddings"]
    compare_topologies(pool, path, [n for n in LENGTHS if n + 16 < context])


# Case 11.8
def test_pd_ids_equal_single_process_ids_on_chain(pool):
    compare_topologies(pool, MODELS / "chain", LENGTHS)


# Case 11.8
def test_pd_ids_equal_single_process_ids_on_smollm2(pool):
    compare_topologies(pool, SMOLLM2, [1, BLOCK, BLOCK + 1, 300])


# Case 11.8
@pytest.mark.parametrize("kv_dtype", FORMATS[1:])
def test_pd_ids_equal_single_process_ids_in_every_kv_format(pool, kv_dtype):
    compare_topologies(pool, MODELS / "tiny-qwen3", [1, BLOCK, BLOCK + 1, 200], worker_flags=(f"--kv-dtype={kv_dtype}",))


# Case 11.8
@pytest.mark.parametrize("checks", [(), ("--kv-checksums",)], ids=["plain", "checksums"])
def test_pd_ids_equal_single_process_ids_over_tcp(pool, checks):
    service = pool.get(MODELS / "tiny-qwen3", "pd", worker_flags=("--kv-transport=tcp",), prefill_flags=checks)
    split = answers(service, MODELS / "tiny-qwen3", [1, BLOCK, BLOCK + 1, 700])
    request = service.request(ids=prompt_ids(1900, 200, seed=9), sampling={"temperature": 0, "max_tokens": 4})
    assert service.stream(request).timings.kv_transport == "tcp"
    service.wait_idle()
    assert split == answers(pool.get(MODELS / "tiny-qwen3", "single"), MODELS / "tiny-qwen3", [1, BLOCK, BLOCK + 1, 700])


def test_kv_is_really_handed_over_and_known_blocks_are_not_sent_again(tiny):
    ids = prompt_ids(1900, 300, seed=77)
    request = tiny.request(ids=ids, sampling={"temperature": 0, "max_tokens": 4})
    first = tiny.stream(request)
    again = tiny.stream(request)
    assert first.ids() == again.ids()
    assert first.timings.kv_transport == "shm"
    # 300 tokens: four full blocks and 44 rows of a fifth. The second time only the fifth travels.
    assert first.timings.kv_bytes % (first.timings.kv_bytes // 300) == 0
    assert again.timings.kv_bytes * 300 == first.timings.kv_bytes * 44
    assert again.usage.cached_prompt_tokens == 256
    # Both sides know how long it took.
    for worker, direction in ((tiny.prefill[0], "send"), (tiny.decode[0], "recv")):
        assert worker.metric("baton_kv_transfer_duration_seconds_count", transport="shm", direction=direction) >= 2
        assert worker.metric("baton_kv_transfer_duration_seconds_sum", transport="shm", direction=direction) > 0


# Case 11.5
def test_one_token_needs_no_hand_over(tiny):
    longer = tiny.stream(tiny.request("In the beginning", sampling={"max_tokens": 2, "temperature": 0}))
    tiny.wait_idle()

    def work():
        """What the decode worker has computed and received."""
        return {key: value for key, value in tiny.decode[0].metrics().items()
                if key.startswith(("baton_generation_tokens_total", "baton_iteration_tokens_count", "baton_kv_transfer_bytes_count"))}
    before = work()
    assert len(before) >= 3
    answer = tiny.stream(tiny.request("In the beginning", sampling={"max_tokens": 1, "temperature": 0}))
    assert len(answer.ids()) == 1 and answer.reason() == "length"
    assert answer.usage.completion_tokens == 1 and answer.timings.kv_bytes == 0
    assert longer.ids()[:1] == answer.ids()
    tiny.wait_idle()
    assert work() == before


# Case 11.5
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_first_token_that_is_an_end_token_ends_the_answer(chain, ignore_eos):
    answer = chain.stream(chain.request("I", sampling={"temperature": 0, "max_tokens": 5, "ignore_eos": ignore_eos}))
    if ignore_eos:
        assert len(answer.ids()) == 5 and answer.reason() == "length"
    else:
        assert len(answer.ids()) == 1 and answer.reason() == "stop" and answer.text() == ""


# Case 11.5
def test_stop_string_in_the_first_token_ends_the_answer(chain):
    whole = chain.stream(chain.request("W", sampling={"temperature": 0, "max_tokens": 3}))
    first = whole.deltas[0][0] or whole.text()[:1]
    answer = chain.stream(chain.request("W", sampling={"temperature": 0, "max_tokens": 50, "stop": [first[0]]}))
    assert answer.text() == "" and answer.reason() == "stop" and len(answer.ids()) == 1


# Case 10.1: with hashes of 8 bits the prefix caches of both workers meet a collision all the time.
def test_colliding_block_hashes_never_change_an_answer(pool):
    prompts = [prompt_ids(1900, 130 + 64 * (i % 3), seed=1000 + i) for i in range(48)]

    def answer(service, prompt):
        result = service.stream(service.request(ids=prompt, sampling={"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 0}))
        return tuple(result.ids()), tuple(entry.logprob for entry in result.logprobs[0])
    plain = pool.get(MODELS / "tiny-qwen3")
    expected = [answer(plain, p) for p in prompts]
    assert len(set(expected)) == len(prompts)
    plain.wait_idle()
    colliding = pool.get(MODELS / "tiny-qwen3", worker_flags=("--test-block-hash-bits=8",))
    for _ in range(2):
        assert [answer(colliding, p) for p in prompts] == expected
    colliding.wait_idle()


# Case 10.3: fresh, cached, and in chunks of three sizes.
@pytest.mark.parametrize("chunk_tokens", [64, 128, 448])
def test_chunks_and_cached_prefixes_do_not_change_an_answer(pool, chunk_tokens):
    prompts = [prompt_ids(1900, length, seed=length) for length in (65, 300, 700)]
    sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}

    def answer(service, prompt):
        result = service.stream(service.request(ids=prompt, sampling=sampling))
        return result.ids(), [(e.logprob, [(t.token_id, t.logprob) for t in e.top]) for e in result.logprobs[0]]
    whole = pool.get(MODELS / "tiny-qwen3")
    expected = [answer(whole, p) for p in prompts]
    whole.wait_idle()
    with harness.Service(MODELS / "tiny-qwen3", prefill_flags=(f"--chunk-tokens={chunk_tokens}",)) as service:
        assert [answer(service, p) for p in prompts] == expected
        # The beginning is cached now; what follows it differs.
        longer = [p[:-1] + [1, 2, 3] for p in prompts]
        cached = [answer(service, p) for p in longer]
        assert cached == [answer(whole, p) for p in longer]
        service.wait_idle()


# Case 14.1
def test_concurrent_requests_give_their_solo_ids(tiny):
    prompts = [prompt_ids(1900, n, seed=n) for n in (3, 17, 64, 65, 100, 129, 200, 333, 5, 90, 128, 400)]
    requests = [tiny.request(ids=p, sampling={"temperature": 0.8 if i % 2 else 0, "seed": i, "max_tokens": 24, "ignore_eos": True})
                for i, p in enumerate(prompts)]
    solo = [tiny.stream(r).ids() for r in requests]
    assert len({tuple(ids) for ids in solo}) == len(solo)
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as threads:
        for _ in range(10):
            together = list(threads.map(lambda r: tiny.stream(r).ids(), requests))
            assert together == solo


# Case 11.4: one test a field that a flag can make differ.
@pytest.mark.parametrize("field, flag", [("kv_dtype", "--kv-dtype=bf16"), ("weight_dtype", "--weight-dtype=int8"),
                                         ("model", "--verify-weights")])
def test_pairs_that_differ_are_refused_by_name(field, flag):
    with harness.Service(MODELS / "tiny-qwen3", decode_flags=(flag,), wait=False) as service:
        code, details = service.refusal(service.request("hello", sampling={"max_tokens": 8}))
        assert code == grpc.StatusCode.FAILED_PRECONDITION and field in details, (code, details)
        assert not service.status().serving
        service.wait_idle()
