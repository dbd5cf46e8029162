"""Two ranks say what one says, whatever the other side of a hand-over has."""
import json
import subprocess

import pytest

import harness
from harness import MODELS, run_baton
from test_handover import BLOCK, CHUNK, answers

LENGTHS = [1, BLOCK, BLOCK + 1, CHUNK + 1, 1000]
PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2)]


def service(pool, model, prefill, decode, worker_flags):
    return pool.get(model, "pd", worker_flags=worker_flags, prefill_flags=(f"--tp={prefill}",), decode_flags=(f"--tp={decode}",))


def devices(pd):
    return {worker["role"]: worker["device"] for worker in json.loads(run_baton("status", f"--address={pd.router.address}", "--json").stdout)["workers"]}


@pytest.fixture(scope="module")
def one_rank():
    """Answers of one process with one rank, by model and flags."""
    known = {}

    def ask(pool, model, lengths, flags=()):
        key = model.name, tuple(lengths), flags
        if key not in known:
            single = pool.get(model, "single", worker_flags=flags)
            known[key] = answers(single, model, lengths)
            single.wait_idle()
        return known[key]
    return ask


# Case 11.4
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("prefill,decode", PAIRS)
def test_ids_are_those_of_one_rank_whatever_the_ranks(pool, one_rank, prefill, decode, transport):
    model = MODELS / "tiny-qwen3"
    pd = service(pool, model, prefill, decode, worker_flags=(f"--kv-transport={transport}",))
    assert answers(pd, model, LENGTHS) == one_rank(pool, model, LENGTHS)
    pd.wait_idle()
    for role, tp in (("prefill", prefill), ("decode", decode)):
        assert devices(pd)[role].endswith(" tp=2") == (tp == 2)


@pytest.mark.parametrize("weight_dtype,kv_dtype", [("int8", "fp8_dynamic"), ("f32", "f32"), ("q4", "bf16")])
def test_ids_are_those_of_one_rank_in_every_format(pool, one_rank, weight_dtype, kv_dtype):
    model, flags = MODELS / "tiny-qwen3", (f"--weight-dtype={weight_dtype}", f"--kv-dtype={kv_dtype}")
    lengths = [1, BLOCK + 1, 300]
    pd = service(pool, model, 1, 2, worker_flags=flags)
    assert answers(pd, model, lengths) == one_rank(pool, model, lengths, flags)
    pd.wait_idle()


# A draft model has one rank; a copy of the model in few bits works in the model's cache, on as many as it.
@pytest.mark.parametrize("drafter", ["--draft-weight-dtype=q4", f"--draft-model={MODELS / 'tiny-qwen3-draft'}"])
def test_speculation_works_with_two_ranks(pool, one_rank, drafter):
    model, lengths = MODELS / "tiny-qwen3", [BLOCK + 1, 300]
    drafting = pool.get(model, "single", worker_flags=("--tp=2",), decode_flags=("--test-free-drafts", drafter))
    assert answers(drafting, model, lengths) == one_rank(pool, model, lengths)
    assert drafting.decode[0].metric("baton_spec_decode_draft_tokens_total") > 0
    drafting.wait_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("model,flags,message", [
    ("random-qwen3-gqa4-yarn", ["--tp=2"], "tp=2: num_kv_heads=1 is not divisible"),
    ("tiny-qwen3", ["--tp=3"], "--tp=3: accepted: 1, 2"),
    ("tiny-qwen3", ["--tp=2", "--device=cuda"], "cuda"),
])
def test_what_two_ranks_cannot_do_is_refused_at_start(role, model, flags, message):
    done = subprocess.run([harness.BIN / f"baton-{role}", f"--model={MODELS / model}", "--listen=127.0.0.1:0", "--http-port=-1", "--num-blocks=8", *flags],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert message in done.stderr


def test_check_config_and_kv_size_know_ranks():
    assert run_baton("check-config", f"--model={MODELS / 'tiny-qwen3'}", "--tp=2", "--num-blocks=64").returncode == 0
    refused = run_baton("check-config", f"--model={MODELS / 'random-qwen3-gqa4-yarn'}", "--tp=2", "--num-blocks=64")
    assert refused.returncode != 0 and "num_kv_heads=1 is not divisible" in refused.stdout
    size = json.loads(run_baton("kv-size", f"--model={MODELS / 'tiny-qwen3'}", "--tp=2", "--json").stdout)
    assert size["tp"] == 2
