#!/usr/bin/env python3
"""What speculation pays: tokens a second with drafts against without, batch 1 and 8, on the CPU backend.

Drives build/bench/speculation_bench, which runs both in turn in one process and fails if an id differs, and writes the
table of docs/measurements/decode.md. A figure is the median of the ratios of the pairs; machines that are shared are
noisy, so the range is printed beside it. With --cpu-time figures are tokens per second of processor time of one thread, which
others on the machine disturb much less. Needs `make build tools models`.
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = ROOT / "tests/data/models/tiny-qwen3"
TINY_DRAFT = ROOT / "tests/data/models/tiny-qwen3-draft"
SMOLLM2 = ROOT / ".cache/models/SmolLM2-135M-Instruct.gguf"

NOTES = [
    "The meeting of the harbour board took place on Tuesday in the old customs house. Mrs Varga reported that the new crane "
    "had been delivered three weeks late and that its electrical cabinet had been damaged on the way. The supplier, Halder "
    "and Sons, has offered to replace the cabinet without charge before the end of the month. Mr Okafor asked who would pay "
    "for the mobile crane that had been hired in the meantime. It was agreed to send the invoice to Halder and Sons.",
    "The library will be closed from the ninth to the sixteenth of August while the reading room is painted. Books that are "
    "due in that week may be returned until the end of the month. The children's corner moves to the ground floor, next to "
    "the entrance, and the newspapers move to the gallery. Readers who have ordered books from other libraries will get a "
    "letter. The staff ask everybody to bring back the keys of the lockers before the eighth of August.",
    "Boil the potatoes in their skins for twenty minutes, let them cool, peel them and cut them into slices. Fry the onions "
    "in butter until they are golden, add the slices of potato and turn them carefully until they are brown on both sides. "
    "Beat four eggs with a little milk, salt, pepper and chopped chives, pour them over the potatoes and let everything set "
    "over a low flame. Serve at once with a green salad and a slice of dark bread.",
    "The night train leaves the capital at ten minutes past nine and reaches the coast at a quarter to seven in the morning. "
    "Passengers with bicycles must reserve a place, since the luggage van takes no more than twelve. The dining car is open "
    "until midnight and again from six o'clock. Between Easter and the end of October the train also stops at the lake. Tickets "
    "are sold at the counter, by telephone and, with a small discount, on the pages of the railway company.",
]
QUESTIONS = [
    "Why is the sky blue?", "Write a short story about a fox who learns to swim.", "What makes bread rise?",
    "Give three tips for learning a language.", "Describe a walk through a forest in autumn.",
    "Explain to a child how a bicycle stays upright.", "What should one think of before buying a house?",
    "Write a letter to a friend who has moved to another country.",
]


def chat(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def editing_prompts():
    # The answer begins with the text itself, as when a document is edited; the model goes on copying.
    prompts = []
    for index in range(8):
        note = NOTES[index % len(NOTES)]
        cut = 60 + 20 * (index // len(NOTES))
        prompts.append(chat(f"Repeat this text word for word:\n\n{note}") + note[:cut])
    return prompts


def bible_prompts():
    text = (ROOT / "tests/data/text/heldout.txt").read_text()
    return [text[start:start + 400] for start in range(0, 8 * 1200, 1200)]


PROMPTS = {"edit": editing_prompts, "questions": lambda: [chat(question) for question in QUESTIONS], "bible": bible_prompts}

# name, model, prompts, settings of the bench. `good`: acceptance is meant to be good, so it must pay.
CASES = [
    ("tiny-qwen3 + draft model", TINY, "bible", {"draft_model": TINY_DRAFT, "ngram": 0}, False),
    ("SmolLM2 4-bit, look-up, text that repeats its input", SMOLLM2, "edit", {"weights": "q4"}, True),
    ("SmolLM2 4-bit, look-up, text without repetition", SMOLLM2, "questions", {"weights": "q4"}, False),
    ("SmolLM2 expanded to bf16, look-up, text that repeats its input", SMOLLM2, "edit", {"weights": "bf16"}, True),
    ("SmolLM2 expanded to bf16, look-up, text without repetition", SMOLLM2, "questions", {"weights": "bf16"}, False),
    ("SmolLM2 expanded to bf16, its own 4-bit copy", SMOLLM2, "questions", {"weights": "bf16", "copy": "q4", "ngram": 0}, True),
    ("SmolLM2 expanded to int8, its own 4-bit copy", SMOLLM2, "questions", {"weights": "int8", "copy": "q4", "ngram": 0}, True),
    ("SmolLM2 4-bit, its own 4-bit copy (switches itself off)", SMOLLM2, "questions", {"weights": "q4", "copy": "q4", "ngram": 0},
     False),
]


def run_case(bench, case, batch, temperature, options):
    name, model, prompts, settings, good = case
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n---\n".join(PROMPTS[prompts]()))
        file.flush()
        argv = [str(bench), str(model), file.name, f"batch={batch}", f"tokens={options.tokens}", f"pairs={options.pairs}",
                f"temperature={temperature}", f"threads={options.threads}"]
        argv += [f"{key}={value}" for key, value in settings.items()]
        run = subprocess.run(argv, capture_output=True, text=True, timeout=1200)
    if run.returncode != 0:
        sys.exit(f"{name}: {run.stderr[-2000:]}")
    pairs = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    plain, drafted = ("plain_cpu", "drafted_cpu") if options.cpu_time else ("plain", "drafted")
    ratios = [pair[drafted] / pair[plain] for pair in pairs]
    total = {key: sum(pair[key] for pair in pairs) for key in ("drafts", "draft_tokens", "accepted", "steps_drafted")}
    result = {
        "name": name, "good": good, "batch": batch, "temperature": temperature, "device": pairs[0]["device"],
        "plain": statistics.median(pair[plain] for pair in pairs),
        "drafted": statistics.median(pair[drafted] for pair in pairs),
        "ratio": statistics.median(ratios), "ratios": ratios,
        "acceptance_length": 1 + total["accepted"] / total["drafts"] if total["drafts"] else 1.0,
        "drafts_per_row": total["draft_tokens"] / total["drafts"] if total["drafts"] else 0.0,
        "acceptance_rate": total["accepted"] / total["draft_tokens"] if total["draft_tokens"] else 0.0,
        "gap": statistics.median(pair["gap_plain"] for pair in pairs),
    }
    print(f"{name:66s} batch {batch} t={temperature}: {result['plain']:8.1f} -> {result['drafted']:8.1f} tok/s "
          f"x{result['ratio']:.2f} [{min(ratios):.2f} {max(ratios):.2f}] length {result['acceptance_length']:.2f} "
          f"rate {result['acceptance_rate']:.2f} gap {100 * result['gap']:.1f} %", flush=True)
    return result


def table(results):
    lines = ["| model and drafts | batch | temperature | tokens/s without | with | ratio (range) | tokens a step with drafts | drafts a row | accepted | gap between steps |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for r in results:
        lines.append(f"| {r['name']} | {r['batch']} | {r['temperature']} | {r['plain']:.1f} | {r['drafted']:.1f} | **{r['ratio']:.2f}** "
                     f"({min(r['ratios']):.2f} to {max(r['ratios']):.2f}) | {r['acceptance_length']:.2f} | {r['drafts_per_row']:.1f} | "
                     f"{100 * r['acceptance_rate']:.0f} % | {100 * r['gap']:.1f} % |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.environ.get("BATON_BUILD_DIR", str(ROOT / "build")))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread instead of time")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--batch", type=int, action="append", help="1 and 8 if not given")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", help="appends a line for each result to this file")
    parser.add_argument("--table", help="writes the table to this file")
    options = parser.parse_args()
    if options.cpu_time:
        options.threads = 1
    bench = pathlib.Path(options.build) / "bench" / "speculation_bench"
    results = []
    record = {"when": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine(),
              "unit": "processor time" if options.cpu_time else "time"}
    for case in CASES:
        if options.only not in case[0]:
            continue
        if not pathlib.Path(case[1]).exists():
            sys.exit(f"{case[1]} is not there: make models")
        for batch in options.batch or [1, 8]:
            results.append(run_case(bench, case, batch, options.temperature, options))
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps(record | {"result": results[-1]}) + "\n")
    if options.table:
        pathlib.Path(options.table).write_text(table(results) + "\n")
    else:
        print(table(results))


if __name__ == "__main__":
    main()
