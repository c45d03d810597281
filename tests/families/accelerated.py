"""What `accelerate` does to every family of transformers that can be built small.

Every call that works before `accelerate(model, parts=PARTS)` is made after it: training with the
dropout of the default configuration, but for attention's, which draws other elements; evaluation
with each optional argument of the forward's signature, generation, saving and loading, and
restoring. A row of accelerated.jsonl is one family: its parts, changed or left with the reason, and
its calls:

    same       the same result: each tensor within 1e-4 of its norm, or of a hundredth of that of
               the largest (some gradients, as of keys' biases, are roundings of 0)
    no         does not work without accelerate either
    refused    raises an error, which does not happen without accelerate
    wrong      another result

What fails is tried again with each part alone; a part that fails is named. Families whose rows are
of today's sources are not tried again. README.md beside the rows is the table.
"""

from __future__ import annotations

import collections
import copy
import inspect
import tempfile
import warnings

import torch
from torch.utils import _pytree as pytree

import tilewright.integrations.transformers as integration
from tests.families.each import table_of, versions
from tests.lib.isolated import Died, isolated
from tests.lib.small_models import build

TOKENS = torch.tensor([[7, 12, 9, 33, 21, 40, 18, 25, 11], [7, 13, 9, 30, 21, 42, 18, 20, 14]])
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
RIGHT = LEFT.flip(1)
B, S = TOKENS.shape
LIMIT = 240  # seconds for a family, for one that hangs


# ---- calls: functions of a model that return tensors


def inputs_of(model, *, labels: bool = False) -> dict[str, torch.Tensor]:
    found = {"input_ids": TOKENS.clone()}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = TOKENS.flip(1)
    if labels:
        found["labels"] = TOKENS.clone()
        found.pop("decoder_input_ids", None)
    return found


def tensors(output) -> list[torch.Tensor]:
    """All tensors of an output but those of caches, whose layout is their own."""
    if hasattr(output, "items"):
        output = {k: v for k, v in output.items() if "past_key_values" not in k}
    return [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]


def train(model, **options) -> list[torch.Tensor]:
    """The loss and all gradients."""
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    try:
        loss = model(**inputs_of(model, labels=True), **options).loss
    finally:
        model.eval()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def checkpointed(model):
    model.gradient_checkpointing_enable()
    try:
        return train(model)
    finally:
        model.gradient_checkpointing_disable()


def evaluate(model, **options) -> list[torch.Tensor]:
    with torch.no_grad():
        torch.manual_seed(2)
        found = tensors(model(**inputs_of(model), **options))
    mask = options.get("attention_mask")
    return found if mask is None else without_padding(found, mask)


def without_padding(found: list[torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
    """What a model computes at padding is no result."""
    kept = mask.bool() if mask.dim() == 2 else None
    if kept is None:
        return found
    rows = [
        t * kept.view(B, S, *(1,) * (t.dim() - 2)) if t.shape[:2] == (B, S) else t for t in found
    ]
    # Attention weights of queries that are padding are no result either.
    return [t * kept[:, None, :, None] if t.dim() == 4 and t.shape[2] == S else t for t in rows]


def labelled(model):
    with torch.no_grad():
        return tensors(model(**inputs_of(model, labels=True)))


def embedded(model):
    given = inputs_of(model)
    embeds = model.get_input_embeddings()(given.pop("input_ids"))
    with torch.no_grad():
        return tensors(model(inputs_embeds=embeds.detach(), **given))


def continued(model, step: int = 1, **first):
    """The prompt with a cache, then further tokens."""
    given = inputs_of(model)
    of = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    with torch.no_grad():
        prompt = model(**given, use_cache=True, **first)
        options = {"past_key_values": prompt.past_key_values, "use_cache": True}
        if "attention_mask" in first:
            options["attention_mask"] = torch.cat((LEFT, LEFT.new_ones(B, step)), 1)
        more = model(**given | {of: TOKENS[:, :step]}, **options)
    logits = [prompt.logits]
    if "attention_mask" in first:
        logits = without_padding(logits, first["attention_mask"])
    return [*logits, more.logits]


def generated(model, *, pads=False, assistant=False, **options):
    given = {"input_ids": TOKENS.clone()}
    if assistant:
        given["input_ids"] = TOKENS[:1].clone()
        options["assistant_model"] = copy.deepcopy(model)
    if pads:
        given["attention_mask"] = LEFT
    torch.manual_seed(3)
    with torch.no_grad():
        found = model.generate(
            **given,
            max_new_tokens=6,
            min_new_tokens=6,
            pad_token_id=0,
            eos_token_id=None,
            **options,
        )
    return [found]


def saved(model):
    """The logits of the model that is loaded from what the model saves."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).eval()
    return evaluate(loaded)


def halved(model):
    """In bfloat16, whose roundings may send a token to other experts: dtypes, shapes, finite."""
    return described(evaluate(copy.deepcopy(model).to(torch.bfloat16)))


def autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        return described([*evaluate(model), *train(model)])


def described(found: list[torch.Tensor]) -> list[torch.Tensor]:
    kinds = [(t.element_size(), t.is_floating_point(), bool(t.isfinite().all())) for t in found]
    return [torch.tensor([*map(int, kind), *t.shape]) for kind, t in zip(kinds, found, strict=True)]


def packed(model):
    at = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]).expand(B, S)
    return evaluate(model, position_ids=at, use_cache=False)


def four_dimensional(model):
    seen = torch.ones(S, S, dtype=torch.bool).tril().expand(B, 1, S, S).clone()
    seen[:, :, 5:, :2] = False
    floats = torch.zeros(B, 1, S, S).masked_fill(~seen, torch.finfo(torch.float32).min)
    return evaluate(model, attention_mask=floats)


def calls_of(model) -> dict:
    """The calls of a model: names and functions of a model."""
    names = inspect.signature(model.forward).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in names.values())
    calls = {
        "train": train,
        "train checkpointed": checkpointed,
        "eval": evaluate,
        "labels": labelled,
        "bfloat16": halved,
        "autocast": autocast,
    }
    if takes_more:
        n = torch.tensor([16])
        calls |= {
            "train num_items_in_batch": lambda m: train(m, num_items_in_batch=n[0]),
            "train num_items_in_batch [[n]]": lambda m: train(m, num_items_in_batch=n[None]),
            "train ignore_index": lambda m: train(m, ignore_index=9),
        }
    values = {
        "attention_mask": {"right": RIGHT, "left": LEFT},
        "decoder_attention_mask": {"": RIGHT},
        "position_ids": {"": torch.arange(S).expand(B, S)},
        "token_type_ids": {"": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]]).expand(B, S).clone()},
        "cache_position": {"": torch.arange(S)},
        "logits_to_keep": {"": 2},
        "use_cache": {"": True},
        "return_dict": {"": False},
        "output_hidden_states": {"": True},
        "output_attentions": {"": True},
        "output_router_logits": {"": True},
        "langs": {"": torch.zeros(B, S, dtype=torch.long)},
        "global_attention_mask": {"": (TOKENS > 30).long()},
        "num_logits_to_keep": {"": 2},
    }
    # transformers' own decorators take these from the keywords.
    hidden = {"return_dict", "output_hidden_states", "output_attentions"} if takes_more else set()
    for name in {*names, *hidden} & values.keys():
        for kind, value in values[name].items():
            calls[f"{name} {kind}".strip()] = lambda m, n=name, v=value: evaluate(m, **{n: v})
    if "inputs_embeds" in names:
        calls["inputs_embeds"] = embedded
    if "attention_mask" in names:
        calls["attention_mask 4d"] = four_dimensional
    if "position_ids" in names:
        calls["position_ids packed"] = packed
    if "past_key_values" in names:
        calls["cache"] = continued
        calls["cache of several"] = lambda m: continued(m, 3)
        if "attention_mask" in names:
            calls["cache padded"] = lambda m: continued(m, attention_mask=LEFT)
    if hasattr(model, "generate"):
        calls |= {
            "greedy": generated,
            "greedy padded": lambda m: generated(m, pads=True),
            "sample": lambda m: generated(m, do_sample=True),
            "beams": lambda m: generated(m, num_beams=2),
            "assisted": lambda m: generated(m, assistant=True),
            "prompt lookup": lambda m: generated_lookup(m),
            "static cache": lambda m: generated(m, cache_implementation="static"),
        }
    calls["save"] = saved
    return calls


def generated_lookup(model):
    torch.manual_seed(3)
    with torch.no_grad():
        return [
            model.generate(
                TOKENS[:1].clone(), max_new_tokens=6, pad_token_id=0, prompt_lookup_num_tokens=2
            )
        ]


# ---- one family


def apart(found: list[torch.Tensor], truth: list[torch.Tensor]) -> str | None:
    """How two results differ, or None."""
    if [t.shape for t in found] != [t.shape for t in truth]:
        return f"shapes {[list(t.shape) for t in found]}, not {[list(t.shape) for t in truth]}"
    least = 1e-2 * max((_norm(t) for t in truth if t.is_floating_point()), default=0.0)
    for a, b in zip(found, truth, strict=True):
        if a.dtype != b.dtype:
            return f"{a.dtype}, not {b.dtype}"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"{int((a != b).sum())} of {a.numel()} integers differ"
            continue
        if not torch.equal(a.isfinite(), b.isfinite()):
            return "other elements are not finite"
        size = max(_norm(b), least, 1e-6)
        if (error := _norm(a - b)) > 1e-4 * size:
            return f"{error / size:.1e} of the norm apart"
    return None


def _norm(t: torch.Tensor) -> float:
    """The norm of the finite elements."""
    return t.double().nan_to_num(0, 0, 0).norm().item()


def attempt(call, model, seen: list[str] | None = None):
    """(tensors, None) or (None, the error in a line). seen: gets the warnings."""
    integration.errors.WARNED.clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [t.detach().clone() for t in call(model)]
        if seen is not None:
            seen += [str(w.message) for w in caught if w.category is UserWarning]
        return found, None
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def outcome(found, truth) -> str:
    (ours, error), (theirs, failed) = found, truth
    if failed:
        return "no"
    if error:
        return f"refused: {error}"
    different = apart(ours, theirs)
    return "same" if different is None else f"wrong: {different}"


def without_attention_dropout(model) -> None:
    for module in model.modules():
        if "Attention" not in type(module).__name__:
            continue
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        for child in module.children():
            if isinstance(child, torch.nn.Dropout):
                child.p = 0.0


def check(kind: str, head: str, only: set[str] | None = None) -> dict:
    """The row of a family. only: of the calls, these."""
    from tilewright.integrations.transformers import PARTS, accelerate, restore

    row: dict = {"family": kind, "head": head}
    try:
        model = build(kind, head, None)
        without_attention_dropout(model)
        evaluate(model)
    except Exception as error:
        return row | {"unbuilt": f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]}
    row["class"] = type(model).__name__
    plain = copy.deepcopy(model)
    calls = {k: v for k, v in calls_of(model).items() if only is None or k in only}
    truth = {name: attempt(call, plain) for name, call in calls.items()}
    again = copy.deepcopy(model)
    for name, call in calls.items():
        if truth[name][0] is not None and outcome(attempt(call, again), truth[name]) != "same":
            truth[name] = None, "not the same twice"
    del plain, again
    ours = copy.deepcopy(model)
    report = accelerate(ours, parts=PARTS, quiet=True)
    changed = {change.part for change in report.changed}
    row["parts"] = {
        part: "; ".join(
            (["changed"] if part in changed else [])
            + ([f"left: {report.left[part]}"] if part in report.left else [])
        )
        for part in PARTS
    }
    row["calls"], row["others"] = {}, {}
    for name, call in calls.items():
        seen: list[str] = []
        row["calls"][name] = outcome(attempt(call, ours, seen), truth[name])
        kinds = [word for word in ("as before accelerate", "its logits") if word in " ".join(seen)]
        if kinds:
            row["others"][name] = kinds
    # A part is the cause if it fails alone.
    row["causes"] = {}
    for name, result in row["calls"].items():
        if result in ("same", "no"):
            continue
        for part in sorted(changed):
            one = copy.deepcopy(model)
            accelerate(one, parts=(part,), quiet=True)
            alone = outcome(attempt(calls[name], one), truth[name])
            if alone != "same":
                row["causes"].setdefault(part, {})[name] = alone
    restored, fresh, row["restored"] = copy.deepcopy(model), copy.deepcopy(model), {}
    accelerate(restored, parts=PARTS, quiet=True)
    restore(restored)
    for name in ("eval", "train"):
        if name in calls and truth[name][1] is None:
            a, b = attempt(calls[name], restored)[0], attempt(calls[name], fresh)[0]
            same = a is not None and b is not None and all(map(torch.equal, a, b))
            row["restored"][name] = "same" if same else "other bits"
    return row


# ---- all of them


def row_of(unit: str) -> dict:
    """`check` in a process of its own."""
    head, kind = unit.split()
    try:
        row = isolated(check, kind, head, limit=LIMIT)
    except Died as error:
        row = {"family": kind, "head": head, "died": str(error)}
    return row | {"versions": versions("accelerated"), "wrong": wrong(row)}


def wrong(row: dict) -> list[str]:
    """The calls that work otherwise, or that the family ends the process."""
    bad = [name for name, result in row.get("calls", {}).items() if result not in ("same", "no")]
    return [*bad, *(["died"] if "died" in row else [])]


def cell(row: dict, part: str) -> str:
    """changed, left or wrong; none where the family has no such part."""
    if row["causes"].get(part):
        return "wrong"
    said = row["parts"].get(part, "")
    if said.startswith("changed"):
        return "changed"
    return "none" if said == "left: the model has none" or not said else "left"


def table(rows: list[dict]) -> str:
    """The Markdown of the page."""
    from tilewright.integrations.transformers import PARTS

    told = {(r["commit"], r["date"], tuple(r["versions"].items())) for r in rows}
    lines = ["# What `accelerate` does to the families of transformers", ""]
    lines += [
        "`python -m tests.families accelerated` wrote this page from `accelerated.jsonl`, "
        + "; ".join(
            f"at {c} on {d} ({', '.join(f'{k} {v}' for k, v in v)})" for c, d, v in sorted(told)
        )
        + ". What each call does, and what the words mean, tests/families/accelerated.py says.",
        "",
    ]
    built = [r for r in rows if "calls" in r]
    counts = collections.Counter(
        result.partition(":")[0] for row in built for result in row["calls"].values()
    )
    lines += [
        f"{len(built)} families, {sum(counts.values())} calls: "
        + ", ".join(f"{n} {name}" for name, n in counts.most_common())
        + ".",
        "",
        "| part | changed | left | wrong | none |",
        "|---|---|---|---|---|",
    ]
    for part in PARTS:
        n = collections.Counter(cell(row, part) for row in built)
        lines.append(
            f"| {part} | "
            + " | ".join(str(n[k]) for k in ("changed", "left", "wrong", "none"))
            + " |"
        )
    lines += ["", "| family | " + " | ".join(PARTS) + " | calls | not the same |"]
    lines += ["|---" * (len(PARTS) + 3) + "|"]
    for row in sorted(built, key=lambda r: (r["head"], r["family"])):
        bad = collections.defaultdict(list)
        for name, result in row["calls"].items():
            if result not in ("same", "no"):
                bad[result[:160]].append(name)
        told = [f"{result} ({', '.join(names)})" for result, names in bad.items()]
        told += [f"restored {k}: {v}" for k, v in row["restored"].items() if v != "same"]
        told = "; ".join(told).replace("|", "/")
        lines.append(
            f"| {row['family']} ({row['head']}) | "
            + " | ".join(cell(row, p) for p in PARTS)
            + f" | {sum(v == 'same' for v in row['calls'].values())} | {told} |"
        )
    lines += ["", "## Why parts are left", "", "| part | reason | families |", "|---|---|---|"]
    reasons = collections.defaultdict(list)
    for row in built:
        for part in PARTS:
            _, found, reason = row["parts"].get(part, "").partition("left: ")
            if found and reason != "the model has none":
                reasons[part, reason.replace("|", "/")].append(row["family"])
    for (part, reason), families in sorted(reasons.items()):
        lines.append(f"| {part} | {reason} | {', '.join(sorted(families))} |")
    other = [r for r in rows if "calls" not in r]
    lines += [
        "",
        "Not built: " + "; ".join(f"{r['family']} ({r.get('unbuilt', 'died')})" for r in other),
    ]
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """README.md beside the rows."""
    rows = table_of("accelerated")
    (rows.file.parent / "README.md").write_text(table(list(rows.rows().values())))
