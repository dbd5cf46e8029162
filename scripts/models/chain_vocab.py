"""The chain model's vocabulary and scripts. Standard library only; see make_chain.py for what they are for."""
import re
import string

import hf_files

NUM_TOKENS_MIN = 736  # Entries before the added tokens, so that end ids stay the same from variant to variant.

# Ordinary words, so that prompts take few tokens and unscripted output reads as words. They come first and so keep
# their ids in every variant. None starts with an upper case letter: " A" must stay two tokens, see below.
WORDS = (
    " the of and to in is it that was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know"
).split()

# The longest list of single steps is the answer that stop strings are tried on: 64 tokens of about three bytes.
LIST_TEXT = (
    "- apples from the hill\n- bread, still warm\n- cheese (old)\n- dried figs & dates\n- eggs: six\n- flour; rye\n"
    "- grapes, a box\n- honey/jam\n- ink + quills\n- juice!\n- kale\n- lemons?\n- mint, 2 pots, dry")

# Trigger -> what follows it. A prompt whose last token is the trigger gets the script. Every token occurs once in all
# scripts together, since the next token depends on the current one alone; hence the odd cuts. A text in a list is one
# token; END, TEXT_END end the answer; LOOP leads back to the first token of the script.
END, TEXT_END, LOOP = hf_files.IM_END, hf_files.END_OF_TEXT, "LOOP"
BUILT_IN = {
    # The chat template's generation prompt ends with this newline, and so does every prompt that ends with one.
    "\n": ["Hello", ",", " the", " bat", "on", " goes", " to", " you", ".", END],
    # U+1FAE0, U+1F979 and U+9F9C, cut inside the characters (4, 3 and 3 tokens).
    "E": [b"\xf0", b"\x9f", b"\xab", b"\xa0", b"\xf0\x9f", b"\xa5", b"\xb9", b"\xe9", b"\xbe", b"\x9c", END],
    # Bytes that are no UTF-8: a lone 0xff, a lead without its tail, a three-byte start cut short.
    "U": [b"\xff", "ok", b"\xc3", "(", b"\xe2\x82", ")", END],
    "I": [END],  # The first token already ends the answer, by either end id.
    "O": [TEXT_END],
    "Z": ["that", " is", " all", " folks", TEXT_END],
    # The last text token starts a stop string such as " stop" or " station" that never comes.
    "P": ["we", " walk", " un", "til", " we", " st", END],
    "L": None,  # LIST_TEXT, cut by the builder.
    "W": list(string.ascii_lowercase) + [LOOP],  # Never ends.
    "T": ["<think>", "\nask", " who", " runs", " next", "\n.", "</think>", "\n\n", "you", " run", END],
}


class Vocab:
    """Entries, added tokens and scripts. First add_script() and cut() in any order, then finish(), then the rest."""

    def __init__(self):
        self.bpe = hf_files.Bpe()
        for word in WORDS:
            self.bpe.add((" " + word).encode())
        self.num_tokens = None
        self.scripts = {}  # trigger -> (ids, the first being the trigger's; what the last one leads to: an id)
        self._pending = {}
        self._has_successor = set()

    def add_script(self, trigger, parts):
        """`parts`: bytes (one token each) or names of added tokens, then END, TEXT_END or LOOP."""
        body, last = parts[:-1], parts[-1]
        if last not in (END, TEXT_END, LOOP) or (last == LOOP and not body):
            raise ValueError(f"script {trigger!r} has no end")
        steps = [self._step(p) for p in [trigger if trigger in hf_files.SPECIALS else trigger.encode()] + body]
        for step in steps:
            if step in self._has_successor or step in (END, TEXT_END):
                raise ValueError(f"script {trigger!r}: token {step!r} has a successor already")
            self._has_successor.add(step)
        self._pending[trigger] = (steps, last)

    def _step(self, part):
        """An added token stays its name until its id is known."""
        return part if isinstance(part, str) else self.bpe.add(part)

    def cut(self, raw, length=None, taken=()):
        """Cuts bytes into tokens without a successor yet: as BPE does or every `length` bytes, longer where taken."""
        parts, at = [], 0

        def is_free(chunk):
            return chunk not in parts and chunk not in taken and self.bpe.ids.get(chunk) not in self._has_successor

        while at < len(raw):
            size = length or len(self.bpe.tokens[self.bpe.encode(raw[at:])[0]])
            while at + size < len(raw) and not is_free(raw[at:at + size]):
                size += 1
            chunk = raw[at:at + size]
            while not is_free(chunk):  # A rest that is taken joins the token before it.
                if not parts:
                    raise ValueError(f"cannot cut {raw!r} into tokens that differ")
                chunk = parts.pop() + chunk
            parts.append(chunk)
            at += size
        return parts

    def finish(self, id_scripts):
        """Fills up to the fixed count of entries, then gives the added tokens their ids and resolves the scripts.

        `id_scripts`: further scripts by trigger, given as token ids after the trigger, the last of them the end.
        """
        letters = string.ascii_lowercase
        for pair in (a + b for a in letters for b in letters):
            self.bpe.add(pair.encode(), size_max=NUM_TOKENS_MIN)
        self.num_tokens = len(self.bpe.tokens)
        for trigger, (steps, last) in self._pending.items():
            ids = [self.special_id(s) if isinstance(s, str) else s for s in steps]
            if trigger not in hf_files.SPECIALS and self.bpe.encode(b" " + trigger.encode())[-1] != ids[0]:
                raise ValueError(f"trigger {trigger!r} is not a token of its own after a space")
            self.scripts[trigger] = (ids, ids[1] if last == LOOP else self.special_id(last))
        for trigger, answer in id_scripts.items():
            self._add_id_script(trigger, answer)

    def _add_id_script(self, trigger, answer):
        steps = [self.bpe.ids.get(trigger.encode())] + answer
        taken = {t for ids, _ in self.scripts.values() for t in ids}
        if steps[0] is None or not all(0 <= t < self.size() for t in answer):
            raise ValueError(f"ids of {trigger!r}: the trigger or an id is not in the vocabulary of {self.size()}")
        if len(set(steps[:-1])) < len(steps) - 1 or taken & set(steps[:-1]):
            raise ValueError(f"ids of {trigger!r}: a token has a successor already")
        self.scripts[trigger] = (steps[:-1], steps[-1])

    def special_id(self, name):
        return self.num_tokens + hf_files.SPECIALS.index(name)

    def size(self):
        """Rows of the embedding: a multiple of 64, the last ones padding that stands for no token, as in Qwen3."""
        return (self.num_tokens + len(hf_files.SPECIALS)) // 64 * 64 + 64

    def token_bytes(self, token):
        """What an id decodes to; padding rows decode to nothing."""
        if token < self.num_tokens:
            return self.bpe.tokens[token]
        index = token - self.num_tokens
        return hf_files.SPECIALS[index].encode() if index < len(hf_files.SPECIALS) else b""

    def next_tokens(self, rng):
        """The chain: list of vocabulary size, next_tokens[id] = the id that follows.

        Entries without a script form two cycles in an order drawn from `rng`: printable ASCII, and the rest. Added
        tokens without one lead into the first cycle; padding rows lead to themselves.
        """
        follows = [None] * self.size()
        for ids, after in self.scripts.values():
            for token, successor in zip(ids, ids[1:] + [after]):
                follows[token] = successor
        free = [t for t in range(self.num_tokens) if follows[t] is None]
        printable = [t for t in free if all(32 <= b < 127 for b in self.bpe.tokens[t])]
        others = sorted(set(free) - set(printable))
        for cycle in (printable, others):
            rng.shuffle(cycle)
            for i, token in enumerate(cycle):
                follows[token] = cycle[(i + 1) % len(cycle)]
        for i in range(len(hf_files.SPECIALS)):
            token = self.num_tokens + i
            if follows[token] is None:
                follows[token] = self._after_added(token, printable)
        return [t if successor is None else successor for t, successor in enumerate(follows)]

    def _after_added(self, token, printable):
        """With ignore_eos an end token goes on with a script of its own, so that such an answer stays readable."""
        script = {self.special_id(END): "\n", self.special_id(TEXT_END): "Z"}.get(token)
        if script in self.scripts:
            return self.scripts[script][0][0 if script == "\n" else 1]
        return printable[token % len(printable)]


def split_added(text):
    """Splits text at the names of added tokens, which stay as parts of their own."""
    return [p for p in re.split("(" + "|".join(re.escape(s) for s in hf_files.SPECIALS) + ")", text) if p]


def built_in():
    """The vocabulary with the built-in scripts, not yet finished."""
    vocab = Vocab()
    for trigger, parts in BUILT_IN.items():
        if parts is not None:
            vocab.add_script(trigger, [p.encode() if isinstance(p, str) and not _is_name(p) else p for p in parts])
    vocab.add_script("L", vocab.cut(LIST_TEXT.encode(), length=3) + [END])
    return vocab


def _is_name(part):
    return part == LOOP or part in hf_files.SPECIALS
