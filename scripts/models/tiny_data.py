"""Text, tokenizer and token stream of the trained models. Needs the Debian package bible-kjv for the text.

The text is the King James Version, public domain. A chapter is a document, one verse a line. Every 60th chapter is held
out of training and of the tokenizer; the first of those make tests/data/text/heldout.txt.
"""
import json
import random
import re
import subprocess

import hf_files

VOCAB = 2048
NUM_TOKENS = VOCAB - 32  # Then 26 added tokens and 6 padding rows.
HELD_OUT_EVERY = 60
HELD_OUT_FIRST = 30
CHATS_PER_CHAPTER = 0.8  # Further documents are chats: a verse asks, the next one answers.


def read_chapters():
    """All 1,189 chapters in order, each a list of verses without their numbers."""
    command = ["bible", "-f", "-l5000", "gen1:1-rev22:21"]  # One verse a line, none wrapped.
    raw = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    chapters, last = [], None
    for line in raw.splitlines():
        match = re.fullmatch(r"(\S+?\d+):\d+ (.+)", line)
        if not match:
            raise ValueError(f"not a verse: {line[:60]!r}")
        if match[1] != last:
            chapters.append([])
            last = match[1]
        chapters[-1].append(match[2].strip())
    return chapters


def split_chapters(chapters):
    """(training, held-out) chapters."""
    held = [c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY == HELD_OUT_FIRST]
    return [c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY != HELD_OUT_FIRST], held


def held_out_text(held, size_max=20000):
    """The file the perplexity tests read: whole held-out chapters, a blank line between them."""
    text = ""
    for chapter in held:
        more = "\n".join(chapter) + "\n"
        if len(text) + len(more) + 1 > size_max:
            continue
        text += ("\n" if text else "") + more
    return text


def train_tokenizer(chapters):
    """tokenizer.json as an object: byte-level BPE on the training text, in the shape of Qwen3's."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(hf_files.SPLIT_REGEX), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=NUM_TOKENS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(("\n".join(c) + "\n" for c in chapters), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(hf_files.to_bytes(x) for x in pair) for pair in model["merges"]]
    bpe = hf_files.Bpe()
    for left, right in merges:
        bpe.add_merge(left, right)
    trained = sorted(model["vocab"], key=model["vocab"].get)
    if [hf_files.to_bytes(t) for t in trained] != bpe.tokens or len(bpe.tokens) != NUM_TOKENS:
        raise ValueError("trained ids are not bytes, then merges in order")
    for token, raw in enumerate(bpe.tokens):
        if bpe.encode(raw) != [token]:
            raise ValueError(f"entry {raw!r} does not encode to itself")
    return hf_files.tokenizer_json(bpe.tokens, bpe.merges)


def chat_document(chapter, rng):
    """Consecutive verses as turns of a chat in the template's form."""
    at = rng.randrange(max(1, len(chapter) - 8))
    verses = chapter[at:at + 2 * rng.randint(1, 4)]
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[i % 2]}\n{v}<|im_end|>\n" for i, v in enumerate(verses)) + "<|endoftext|>"


def token_stream(chapters, tokenizer, seed):
    """One epoch: all chapters shuffled, some chats between them; a list of ids."""
    rng = random.Random(seed)
    documents = ["\n".join(c) + "\n<|endoftext|>" for c in chapters]
    documents += [chat_document(rng.choice(chapters), rng) for _ in range(int(CHATS_PER_CHAPTER * len(chapters)))]
    rng.shuffle(documents)
    return [i for e in tokenizer.encode_batch(documents) for i in e.ids]
