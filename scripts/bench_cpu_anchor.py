#!/usr/bin/env python3
"""CPU speed of Baton beside llama.cpp, sample by sample in turn, on one random-weight model.

Each Baton sample is bracketed by probes (AMX bf16 and FMA in registers, DRAM read): AMX speed on shared hosts jumps between
two levels, so only samples with the same label compare. Prints every sample, then medians, ratios and percent of the floor
(prefill: the peak of AMX, or of FMA where there is none; decode: the DRAM read), then one JSON line.

The rival is the PyPI package llama-cpp-python, built here from source for this machine into .cache/anchor (minutes, once), on
the same weights as a GGUF file, with flash attention. Its BF16 kernels do not use AMX; a GCC 12 build of its quantised ones
dies of SIGILL on AMX machines, so --rival-dtype q8_0 is for others. --no-rival measures Baton alone.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CACHE = os.path.join(ROOT, ".cache")
TOOLS_PYTHON = os.path.join(CACHE, "tools", "venv", "bin", "python")  # has numpy: make tools
RIVAL = "llama-cpp-python==0.3.36"
GOAL = {"prefill": 3.0, "decode": 1.3}  # what first light must reach against llama.cpp's bf16

# Runs in the venv: commands on stdin, one JSON line each, like cpu_anchor_bench.
RIVAL_PROGRAM = r"""
import json, sys, time
from llama_cpp import Llama
path, threads, prompt, gen = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
llm = Llama(model_path=path, n_ctx=prompt + gen + 64, n_batch=prompt, n_ubatch=prompt, n_threads=threads,
            n_threads_batch=threads, flash_attn=True, verbose=False)
state, tokens = 12345, []
for _ in range(prompt + gen):
    state = (state * 1664525 + 1013904223) & 0xffffffff
    tokens.append((state >> 8) % llm.n_vocab())
print(json.dumps({"ready": True, "device": "llama.cpp"}), flush=True)
for line in sys.stdin:
    if line.strip() == "prefill":
        llm.reset()
        start = time.perf_counter()
        llm.eval(tokens[:prompt])
        count = prompt
    else:
        start = time.perf_counter()
        for token in tokens[prompt:]:
            llm.eval([token])
        count = gen
    seconds = time.perf_counter() - start
    print(json.dumps({"test": line.strip(), "tokens": count, "seconds": seconds, "tokens_per_second": count / seconds}), flush=True)
"""


def generate(cache, preset, arguments, path):
    """Runs the generator into a folder or file that gets its name only when it is whole."""
    if os.path.exists(path):
        return
    python = TOOLS_PYTHON if os.path.exists(TOOLS_PYTHON) else sys.executable
    unfinished = path + ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    print(f"making {os.path.relpath(path, cache)}", flush=True)
    subprocess.run([python, os.path.join(ROOT, "scripts", "make_random_qwen3.py"), "--preset", preset]
                   + [unfinished if argument is None else argument for argument in arguments], check=True)
    os.rename(unfinished, path)


def prepare_model(cache, preset, rival_dtype):
    """The same weights as a Hugging Face directory and, for the rival, as GGUF."""
    os.makedirs(os.path.join(cache, "anchor"), exist_ok=True)
    directory = os.path.join(cache, "anchor", preset)
    gguf = os.path.join(cache, "anchor", f"{preset}-{rival_dtype}.gguf")
    generate(cache, preset, ["--hf", None], directory)
    if rival_dtype:
        generate(cache, preset, ["--gguf", None, "--gguf-dtype", rival_dtype], gguf)
    return directory, gguf


def prepare_rival(cache):
    venv = os.path.join(cache, "anchor", "venv")
    python = os.path.join(venv, "bin", "python")
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode != 0:
        print(f"building {RIVAL} for this machine (minutes)", flush=True)
        environment = dict(os.environ, CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF")
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-binary", "llama-cpp-python", RIVAL],
                       check=True, env=environment)
    return python


def work(directory, options):
    """FLOP of one prefill and bytes that one decoded token reads: linear layers, head, attention, KV cache in FP8."""
    with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    layers, hidden, dim = config["num_hidden_layers"], config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    linear = layers * hidden * (dim * (2 * heads + 2 * kv_heads) + 3 * config["intermediate_size"])
    head = hidden * config["vocab_size"]
    flop = 2 * (linear * options.prompt + head) + 2 * layers * heads * dim * options.prompt ** 2
    weight_bytes = {"f32": 4, "bf16": 2, "int8": 1, "q4": 0.625}.get(options.weights, 2)  # q4: f16 scale and minimum per 32
    context = options.prompt + options.gen / 2
    return flop, (linear + head) * weight_bytes + 2 * layers * kv_heads * dim * context


def percent_of_floor(test, sample, flop, read_bytes, threads):
    """Of the probes taken around this very sample."""
    if test == "decode":
        return 100 * sample["tokens_per_second"] * read_bytes / (statistics.mean(sample["read_gb_per_second"]) * 1e9)
    amx = statistics.mean(sample["amx_tflops"]) * 1e12
    peak = amx if amx > 0 else statistics.mean(sample["fma_gflops"]) * 1e9
    return 100 * flop / sample["seconds"] / (peak * threads)


class Runner:
    """A process that answers one command line with one JSON line."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.device = self._read()["device"]

    def sample(self, test):
        self.process.stdin.write(test + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args[0]} ended early with status {self.process.wait()}")
        return json.loads(line)


def label(sample):
    """fast, slow or mixed by the AMX probes; none without AMX. 1.8 lies between the two levels of one core in TFLOP/s."""
    probes = sample["amx_tflops"]
    if max(probes) == 0:
        return "none"
    if min(probes) > 1.8:
        return "fast"
    return "slow" if max(probes) <= 1.8 else "mixed"


def describe(name, sample):
    text = f"{name:10s} {sample['test']:8s} {sample['tokens_per_second']:9.2f} tokens/s"
    if "amx_tflops" in sample:
        text += (f"   amx={sample['amx_tflops']} TFLOP/s a thread ({label(sample)}) fma={sample['fma_gflops']} GFLOP/s a thread"
                 f" read={sample['read_gb_per_second']} GB/s")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build"), help="build folder")
    parser.add_argument("--preset", default="qwen3-0.6b")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", default="bf16", help="auto, f32, bf16, int8 or q4")
    parser.add_argument("--isa", default="auto", help="auto, avx2, avx512 or amx")
    parser.add_argument("--rival-dtype", default="bf16", help="of the GGUF file: bf16, q8_0 or q4_0")
    parser.add_argument("--no-rival", action="store_true", help="measure Baton alone")
    parser.add_argument("--cache", default=CACHE, help="folder for the models and the rival")
    options = parser.parse_args()

    directory, gguf = prepare_model(options.cache, options.preset, "" if options.no_rival else options.rival_dtype)
    bench = os.path.join(os.path.abspath(options.build), "bench", "cpu_anchor_bench")
    runners = {"baton": Runner([bench, directory, f"threads={options.threads}", f"prompt={options.prompt}",
                                f"gen={options.gen}", f"weights={options.weights}", f"isa={options.isa}"])}
    if not options.no_rival:
        runners["llama.cpp"] = Runner([prepare_rival(options.cache), "-c", RIVAL_PROGRAM, gguf, str(options.threads),
                                       str(options.prompt), str(options.gen)])
    print(f"baton: {runners['baton'].device}, weights {options.weights}; {options.prompt} prompt tokens, {options.gen} decoded")

    samples = {name: {"prefill": [], "decode": []} for name in runners}
    for round_number in range(options.rounds + 1):
        for test in ("prefill", "decode"):
            for name, runner in runners.items():
                sample = runner.sample(test)
                time.sleep(0.2)  # the other's threads go to sleep
                if round_number == 0:
                    continue  # warm-up
                samples[name][test].append(sample)
                print(describe(name, sample), flush=True)
    for runner in runners.values():
        runner.close()

    result = {"preset": options.preset, "weights": options.weights, "device": runners["baton"].device}
    flop, read_bytes = work(directory, options)
    for test, goal in GOAL.items():
        ours = statistics.median(s["tokens_per_second"] for s in samples["baton"][test])
        result[f"baton_{test}"] = round(ours, 2)
        percent = statistics.median(percent_of_floor(test, s, flop, read_bytes, options.threads) for s in samples["baton"][test])
        result[f"floor_percent_{test}"] = round(percent, 1)
        line = f"{test}: baton {ours:.2f} tokens/s, {percent:.0f} % of the floor"
        if "llama.cpp" in samples:
            theirs = statistics.median(s["tokens_per_second"] for s in samples["llama.cpp"][test])
            result[f"llama_{test}"] = round(theirs, 2)
            result[f"ratio_{test}"] = round(ours / theirs, 3)
            line += f", llama.cpp {options.rival_dtype} {theirs:.2f}, ratio {ours / theirs:.2f}"
            line += f" (goal on AMX against bf16: {goal})"
        print(line)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
