"""Chat templates, tokenizers of characters, and conversations."""

import tokenizers
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tilewright.trainer.columns import IGNORE

START, END, BOS = "<|im_start|>", "<|im_end|>", "<s>"


TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
)


PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


CHATML = TURNS + PROMPT


TOOLS = "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '\n' }}{% endif %}"


MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}" + PROMPT
)


# As Qwen3 does: only the last answer keeps its reasoning.
REASONED = (
    TURNS.replace(
        "{{ m['content']",
        "{{ '(so)' if m['role'] == 'assistant' and loop.last }}{{ m['content']",
    )
    + PROMPT
)


PLAIN = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def characters(template=CHATML):
    """A fast tokenizer with a token per character, and special ones."""
    names = [START, END, BOS, *map(chr, range(10)), "\n", *map(chr, range(32, 127)), "?"]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, bos_token=BOS, additional_special_tokens=[START]
    )
    tokenizer.chat_template = template
    return tokenizer


def messages(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def runs(labels):
    """Runs of labels that are not ignored."""
    out = [[]]
    for label in labels:
        if label != IGNORE:
            out[-1].append(label)
        elif out[-1]:
            out.append([])
    return [run for run in out if run]


def of_words(words, template, **special):
    """A fast tokenizer with a token per word, of which the first stands for unknown ones.

    special: as eos_token="</s>".
    """
    made = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, words[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.chat_template = template
    return tokenizer
