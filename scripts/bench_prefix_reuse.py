#!/usr/bin/env python3
"""Time to first token of the second turn of a chat, with a history of about 2,000 tokens, against the same prompt unknown.

Starts a router, a prefill and a decode worker with SmolLM2 (4,096 tokens of context are enough of its 8,192) and, per
round, sends a first turn with a long user message, then a second turn that carries the whole conversation. The rival is the
same second prompt under another cache salt: nothing of it is cached. Both counts come back with the answers: the tokens the
prefill worker found, and the bytes that travelled. Prints one line per round and the median drop; --json appends the record.
Needs `make build tools models`; run it with .cache/tools/venv/bin/python.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
import harness  # noqa: E402

NOTE = ("On the {n}th day the survey ship measured a depth of {d} fathoms near the reef, and the wind came from the north-west "
        "with a force of {f}. The second boat brought back shells, two kinds of coral and a broken oar. ")


def history(round_number, tokens_wanted):
    parts = [NOTE.format(n=1000 * round_number + i, d=17 * i % 251, f=i % 9) for i in range(tokens_wanted // 48)]
    return "Here is a logbook:\n" + "".join(parts) + "\nWhat did the second boat bring back?"


def chat(*messages):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


def timed(service, prompt, max_tokens, salt):
    request = service.request(prompt, parse_special=True, cache_salt=salt,
                              sampling={"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True})
    start = time.perf_counter()
    call = service.stub.Generate(request, timeout=300)
    first, text, usage, timings = None, "", None, None
    for message in call:
        if first is None and len(message.token_ids):
            first = time.perf_counter() - start
        text += message.text
        if message.HasField("finished"):
            usage, timings = message.finished.usage, message.finished.timings
    return first, text, usage, timings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    options = parser.parse_args()
    drops, rounds = [], []
    with harness.Service(harness.SMOLLM2, threads=options.threads, kv_blocks=512) as service:
        timed(service, chat(("user", history(99, options.tokens))), 8, "warm-up")
        for number in range(options.rounds):
            first_turn = ("user", history(number, options.tokens))
            _, answer, _, _ = timed(service, chat(first_turn), 80, "chat")
            second = chat(first_turn, ("assistant", answer), ("user", "And on which day was that?"))
            cached, text, usage, timings = timed(service, second, 8, "chat")
            unknown, same, all_usage, all_timings = timed(service, second, 8, f"unknown {number}")
            assert text == same, "answers differ with the cache"
            drops.append(1 - cached / unknown)
            rounds.append({"prompt_tokens": usage.prompt_tokens, "cached_prompt_tokens": usage.cached_prompt_tokens,
                           "ttft_cached_s": cached, "ttft_unknown_s": unknown, "kv_bytes_cached": timings.kv_bytes,
                           "kv_bytes_unknown": all_timings.kv_bytes, "drop": drops[-1]})
            print(f"prompt {usage.prompt_tokens} tokens, {usage.cached_prompt_tokens} of them cached on prefill: TTFT {unknown * 1e3:.0f} ms "
                  f"-> {cached * 1e3:.0f} ms (-{100 * drops[-1]:.0f} %), KV sent {all_timings.kv_bytes / 1e6:.2f} MB -> "
                  f"{timings.kv_bytes / 1e6:.2f} MB", flush=True)
    print(f"median drop of the second turn's TTFT: {100 * statistics.median(drops):.0f} %")
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps({"when": time.strftime("%Y-%m-%d"), "rounds": rounds}) + "\n")


if __name__ == "__main__":
    main()
