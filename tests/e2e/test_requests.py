"""What a request may ask for: limits, sampling parameters, seeds, log probabilities. Obeyed or refused, never ignored."""
import collections
import concurrent.futures
import math
import time

import grpc
import pytest

import harness
from harness import MODELS, pb, status_of

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONTEXT_FLAG = ("--max-model-len=256",)


@pytest.fixture
def small_context(pool):
    service = pool.get(MODELS / "tiny-qwen3", worker_flags=CONTEXT_FLAG, router_flags=CONTEXT_FLAG)
    yield service
    service.wait_idle()


def still_works(service):
    assert len(service.ids("And God said", sampling={"max_tokens": 4, "temperature": 0, "ignore_eos": True})) == 4


# Case 4.1
@pytest.mark.parametrize("max_tokens, expected", [(None, 256 - 3), (1, 1), (5, 5), (2**31 - 1, 256 - 3)])
def test_max_tokens_is_absent_small_or_clamped_to_the_context(small_context, max_tokens, expected):
    sampling = {"temperature": 0, "ignore_eos": True}
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    answer = small_context.stream(small_context.request(ids=[300, 301, 302], sampling=sampling))
    assert len(answer.ids()) == expected and answer.reason() == "length"


# Case 4.1, 6.3: an explicit zero is not "not set".
def test_max_tokens_zero_is_refused(small_context):
    code, details = status_of(lambda: small_context.stream(small_context.request("hi", sampling={"max_tokens": 0})))
    assert code == INVALID and "max_tokens" in details


# Case 4.2
@pytest.mark.parametrize("length", [257, 2560])
def test_a_prompt_above_the_context_is_refused_with_both_numbers_and_disturbs_nobody(small_context, length):
    request = small_context.request(ids=[300] * 5, sampling={"temperature": 0, "max_tokens": 100, "ignore_eos": True})
    alone = small_context.stream(request).ids()
    call = small_context.stub.Generate(request, timeout=60 * harness.SLOWNESS)
    first = next(call)
    code, details = status_of(lambda: small_context.stream(small_context.request(ids=[300] * length, sampling={"max_tokens": 4})))
    assert code == INVALID and str(length) in details and "256" in details
    assert list(first.token_ids) + [i for m in call for i in m.token_ids] == alone


def test_a_prompt_that_fills_the_context_has_no_room_for_an_answer(small_context):
    code, details = status_of(lambda: small_context.stream(small_context.request(ids=[300] * 256)))
    assert code == INVALID and "256" in details
    assert len(small_context.ids(ids=[300] * 255, sampling={"ignore_eos": True})) == 1


# Case 4.3
@pytest.mark.parametrize("fields", [{"prompt": ""}, {"ids": []}, {"chat": pb.Chat()}, {}])
def test_an_empty_prompt_is_refused(tiny, fields):
    code, _ = status_of(lambda: tiny.stream(tiny.request(**fields)))
    assert code == INVALID
    still_works(tiny)


# Case 4.3
def test_a_chat_message_with_empty_content_is_valid(tiny):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="")])
    assert tiny.ids(chat=chat, sampling={"max_tokens": 2, "ignore_eos": True})


# Case 4.4
def test_the_clients_label_may_repeat(tiny):
    requests = [tiny.request(f"In the day {i}", request_label="same", sampling={"temperature": 0, "max_tokens": 20, "ignore_eos": True})
                for i in range(2)]
    solo = [tiny.stream(r).ids() for r in requests]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(tiny.stream, requests))
    assert [a.ids() for a in answers] == solo
    assert len({a.messages[-1].request_id for a in answers}) == 2


# Case 4.4: again just after the end, and from another router over the same workers.
def test_the_clients_label_may_repeat_after_the_end_and_on_another_router():
    with harness.Service(MODELS / "tiny-qwen3") as service:
        other = service.add_router()
        requests = [service.request(f"In the day {i}", request_label="same", sampling={"temperature": 0, "max_tokens": 40, "ignore_eos": True})
                    for i in range(2)]
        solo = [service.stream(r) for r in requests]
        assert len({a.messages[-1].request_id for a in solo}) == 2
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            here = [threads.submit(service.stream, requests[i % 2]) for i in range(4)]
            there = [threads.submit(lambda i=i: harness.Answer(other.Generate(requests[i % 2], timeout=60 * harness.SLOWNESS))) for i in range(4)]
            for i, (a, b) in enumerate(zip(here, there)):
                assert a.result().ids() == b.result().ids() == solo[i % 2].ids()
        service.wait_idle()


# Case 5.2
@pytest.mark.parametrize("sampling, field", [
    ({"top_p": -0.1}, "top_p"), ({"top_p": 1.01}, "top_p"), ({"top_k": -2}, "top_k"), ({"temperature": -1.0}, "temperature"),
    ({"temperature": float("nan")}, "temperature"), ({"temperature": float("inf")}, "temperature"), ({"min_p": -0.5}, "min_p"),
    ({"min_p": 1.5}, "min_p"), ({"repetition_penalty": 0.0}, "repetition_penalty"), ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"), ({"frequency_penalty": -2.5}, "frequency_penalty"), ({"stop": [""]}, "stop"),
    ({"stop": [f"s{i}" for i in range(100)]}, "stop"), ({"stop": ["x" * 5000]}, "stop"), ({"logit_bias": {5: 101.0}}, "logit_bias"),
    ({"logit_bias": {5: float("nan")}}, "logit_bias"), ({"logit_bias": {10**6: 1.0}}, "logit_bias"), ({"logprobs": 21}, "logprobs"),
    ({"n": 0}, "n"), ({"n": 17}, "n"), ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"), ({"stop_token_ids": [10**6]}, "stop_token_ids"),
])
def test_values_out_of_range_are_refused_by_name(tiny, sampling, field):
    code, details = status_of(lambda: tiny.stream(tiny.request("hello", sampling=sampling)))
    assert code == INVALID and field in details, details
    code, _ = status_of(lambda: tiny.unary(tiny.request("hello", sampling=sampling)))
    assert code == INVALID


# Case 5.2
@pytest.mark.parametrize("sampling", [{"top_p": 0.0}, {"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-7}])
def test_the_values_that_mean_greedy_are_greedy(tiny, sampling):
    greedy = tiny.ids("And it came to pass", sampling={"temperature": 0, "max_tokens": 16, "ignore_eos": True})
    assert tiny.ids("And it came to pass", sampling={"max_tokens": 16, "ignore_eos": True, "seed": 3, **sampling}) == greedy


# Case 5.2
@pytest.mark.parametrize("top_k", [0, -1, 10**6])
def test_top_k_off_is_off(tiny, top_k):
    plain = tiny.ids("And", sampling={"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 5, "max_tokens": 16, "ignore_eos": True})
    assert tiny.ids("And", sampling={"temperature": 1.0, "top_k": top_k, "top_p": 1.0, "seed": 5, "max_tokens": 16, "ignore_eos": True}) == plain


# Case 5.1
@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-9, 1e-38])
def test_small_temperatures_do_not_overflow(chain, tiny, temperature):
    sampling = {"max_tokens": 20, "ignore_eos": True, "seed": 1}
    assert chain.ids("E", sampling={**sampling, "temperature": temperature}) == chain.ids("E", sampling={**sampling, "temperature": 0})
    assert len(set(tiny.ids("And", sampling={**sampling, "temperature": temperature}))) > 2


# Case 6.1
def test_a_seed_gives_the_same_ids_beside_any_neighbours(tiny):
    request = tiny.request("The king", sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 42, "max_tokens": 16, "ignore_eos": True})
    alone = tiny.stream(request).ids()
    noise = [tiny.request(f"{i} and", sampling={"temperature": 1.0, "max_tokens": 10 + i % 7}) for i in range(24)]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        others = [threads.submit(tiny.stream, r) for r in noise]
        repeats = [threads.submit(lambda: tiny.stream(request).ids()) for _ in range(20)]
        assert all(r.result() == alone for r in repeats)
        for other in others:
            other.result()


# Case 6.1: without a seed, answers differ and the seed drawn is told.
def test_an_absent_seed_is_drawn_and_returned(tiny):
    answers = [tiny.stream(tiny.request("The king", sampling={"temperature": 1.2, "max_tokens": 24, "ignore_eos": True})) for _ in range(3)]
    assert len({a.usage.seed for a in answers}) == 3 and len({tuple(a.ids()) for a in answers}) > 1
    again = tiny.ids("The king", sampling={"temperature": 1.2, "max_tokens": 24, "ignore_eos": True, "seed": answers[0].usage.seed})
    assert again == answers[0].ids()


# Case 6.2
def test_n_choices_differ_and_the_set_repeats(tiny):
    request = tiny.request("And there was", sampling={"n": 4, "seed": 7, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 12, "ignore_eos": True})
    first, second = tiny.stream(request), tiny.stream(request)
    assert first.token_ids == second.token_ids and sorted(first.token_ids) == [0, 1, 2, 3]
    assert len({tuple(ids) for ids in first.token_ids.values()}) == 4
    assert first.usage.completion_tokens == 48
    one = tiny.ids("And there was", sampling={"n": 1, "seed": 7, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 12, "ignore_eos": True})
    assert one == first.ids(0)
    greedy = tiny.stream(tiny.request("And there was", sampling={"n": 3, "temperature": 0, "max_tokens": 8, "ignore_eos": True}))
    assert len({tuple(ids) for ids in greedy.token_ids.values()}) == 1


# Case 6.3
def test_explicit_zeros_are_obeyed(tiny):
    base = {"max_tokens": 12, "ignore_eos": True}
    zero_seed = tiny.stream(tiny.request("So", sampling={**base, "temperature": 1.0, "seed": 0}))
    assert zero_seed.usage.seed == 0
    assert zero_seed.ids() == tiny.ids("So", sampling={**base, "temperature": 1.0, "seed": 0})
    assert tiny.ids("So", sampling={**base, "temperature": 0.0}) == tiny.ids("So", sampling={**base, "temperature": 0.0, "seed": 9})
    defaults = tiny.stub.GetModelInfo(pb.GetModelInfoRequest()).defaults
    assert defaults.HasField("temperature")


# Case 7.1
def test_log_probabilities_belong_to_their_position(tiny):
    prompt = tiny.stub.Tokenize(pb.TokenizeRequest(text="In the beginning God created")).ids
    answer = tiny.stream(tiny.request(ids=prompt, sampling={"temperature": 0, "max_tokens": 8, "logprobs": 3, "ignore_eos": True}))
    entries = answer.logprobs[0]
    assert len(entries) == 8 and [e.token_id for e in entries] == answer.ids()
    for entry in entries:
        assert len(entry.top) == 3 and entry.top[0].token_id == entry.token_id
        assert math.isclose(entry.top[0].logprob, entry.logprob, abs_tol=1e-6) and entry.logprob <= 0
        assert entry.top[0].logprob >= entry.top[1].logprob >= entry.top[2].logprob
    # Each position again, as the first token of a prompt that ends just before it.
    for k in range(8):
        fresh = tiny.stream(tiny.request(ids=[*prompt, *answer.ids()[:k]], sampling={"temperature": 0, "max_tokens": 1, "logprobs": 3}))
        assert fresh.ids() == [answer.ids()[k]]
        assert math.isclose(fresh.logprobs[0][0].logprob, entries[k].logprob, abs_tol=1e-4)
        assert [t.token_id for t in fresh.logprobs[0][0].top] == [t.token_id for t in entries[k].top]


# Case 7.2
def test_the_token_sampled_on_prefill_has_its_log_probability_for_every_choice(pool):
    def run(service):
        request = service.request("And the people", sampling={"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 6, "logprobs": 2, "ignore_eos": True})
        answer = service.stream(request)
        service.wait_idle()
        return {i: [(e.token_id, e.logprob, [(t.token_id, t.logprob) for t in e.top]) for e in entries] for i, entries in answer.logprobs.items()}
    split, together = run(pool.get(MODELS / "tiny-qwen3")), run(pool.get(MODELS / "tiny-qwen3", "single"))
    assert split == together and all(len(entries) == 6 for entries in split.values())


def test_penalties_and_bias_have_their_effect(tiny):
    base = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    plain = tiny.ids("the the the", sampling=base)
    banned = plain[0]
    assert banned not in tiny.ids("the the the", sampling={**base, "logit_bias": {banned: -100.0}})
    forced = 1234
    assert set(tiny.ids("the the the", sampling={**base, "logit_bias": {forced: 100.0}})) == {forced}
    repeats = lambda ids: max(collections.Counter(ids).values())
    assert repeats(tiny.ids("the the the", sampling={**base, "frequency_penalty": 2.0})) <= repeats(plain)
    assert tiny.ids("the the the", sampling={**base, "repetition_penalty": 1.8}) != plain


def test_an_unknown_model_is_not_found(tiny):
    code, details = status_of(lambda: tiny.stream(tiny.request("hi", model="gpt-17")))
    assert code == grpc.StatusCode.NOT_FOUND and "gpt-17" in details


# Case 9.2: large input is refused before any work, or done in linear time; health answers meanwhile.
def test_a_megabyte_of_one_word_does_not_block_the_router(tiny):
    start = time.monotonic()
    code, _ = status_of(lambda: tiny.stream(tiny.request("a" * 1_000_000)))
    assert code == INVALID and time.monotonic() - start < 3 * harness.SLOWNESS
    assert tiny.router.http_status("/health") == 200


# Case 9.2: health answers while megabytes are encoded.
def test_health_answers_while_a_long_text_is_encoded(tiny):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    health = health_pb2_grpc.HealthStub(tiny.channel)
    encoding = tiny.stub.Tokenize.future(pb.TokenizeRequest(text="ab" * 2_000_000), timeout=120 * harness.SLOWNESS)
    polls = 0
    while not encoding.done():
        reply = health.Check(health_pb2.HealthCheckRequest(service="baton.v1.Generation"), timeout=1 * harness.SLOWNESS)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        polls += 1
    assert polls > 0 and len(encoding.result().ids) > 1000


def test_errors_carry_the_field_in_their_details(tiny):
    with pytest.raises(grpc.RpcError) as error:
        tiny.unary(tiny.request("hello", sampling={"top_p": 7.0}))
    trailers = dict(error.value.trailing_metadata())
    assert b"sampling.top_p" in trailers["grpc-status-details-bin"] or b"top_p" in trailers["grpc-status-details-bin"]


# Case 8.2: odd histories render or are refused, never INTERNAL.
@pytest.mark.parametrize("messages", [["assistant"], ["system"], ["tool"], ["user", "user"], ["system", "assistant", "tool"]])
def test_odd_chat_histories_never_end_internal(tiny, messages):
    chat = pb.Chat(messages=[pb.ChatMessage(role=role, content="x") for role in messages])
    try:
        tiny.stream(tiny.request(chat=chat, sampling={"max_tokens": 2}))
    except grpc.RpcError as error:
        assert error.code() == INVALID
