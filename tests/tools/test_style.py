"""Rules of CONTRIBUTING.md that no linter covers, checked on the syntax trees."""

import ast
import functools
import gc
import io
import itertools
import pathlib
import re
import subprocess
import tokenize
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = [
    path
    for folder in ("tilewright", "lab/tilewright_lab", "bench", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.name.endswith("_pb2.py")  # protoc writes them
]
KERNELS = sorted((ROOT / "tilewright/kernels").rglob("*_triton.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@functools.cache
def parsed(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return tree_of(path.read_text(), ".".join(parts).removeprefix("lab."))


def tree_of(text, module="tilewright.bench.planted"):
    """Its syntax tree, with the module's name and lines, its nodes and functions, and (line, name)
    of what it imports, and of that and what it uses.
    """
    tree = ast.parse(text)
    tree.module, tree.lines = module.removesuffix(".__init__"), text.splitlines()
    tree.nodes, tree.functions = list(ast.walk(tree)), list(functions_of(tree.body))
    tree.names, tree.imports = [], []
    for node in tree.nodes:
        if isinstance(node, ast.Attribute | ast.Name):
            tree.names.append((node.lineno, dotted(node)))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if getattr(node, "module", None) else ""
            tree.imports += [(node.lineno, f"{start}{a.name}") for a in node.names]
    tree.names += tree.imports
    return tree


@pytest.fixture(scope="module", autouse=True)
def _no_collections():
    """Looking for garbage among all these trees takes as long as making them."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()


def dotted(node):
    """`a.b.c` as text; the last names of any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_like(names, pattern, why):
    for line, name in names:
        if re.fullmatch(pattern, name):
            yield line, f"{name}: {why}"


def environment(tree):
    """One place lists all that can change a run."""
    yield from names_like(tree.names, r"os\.(environ|getenv|putenv)", "only platform.py reads it")


def generated(tree):
    yield from names_like(tree.names, "exec|eval", "code from strings cannot be found by reading")


def retried(tree):
    yield from names_like(tree.names, r".*\.(flaky|reruns)", "a test is retried")


BROAD = ("ImportError", "ModuleNotFoundError", "Exception")


def swallowed(tree):
    """A caught and discarded exception: the reason for a missing package is lost."""
    for node in tree.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "Exception"
            empty = all(
                isinstance(s, ast.Pass | ast.Continue)
                or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
                for s in node.body
            )
            if empty and set(BROAD) & set(re.findall(r"\w+", caught)):
                yield node.lineno, "an exception is caught and forgotten"
        called = dotted(node.func) if isinstance(node, ast.Call) else ""
        if called.endswith("suppress") and any(dotted(a) in BROAD for a in node.args):
            yield node.lineno, "an exception is suppressed and forgotten"


ON_IMPORT = re.compile(
    r"setattr|torch\.(manual_seed|set_default_dtype|set_num_threads)"
    r"|warnings\.(filterwarnings|simplefilter)"
)


def patched(tree):
    """A module that modifies another one on import."""
    modules = {
        (a.asname or a.name).split(".")[0]
        for node in tree.nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for a in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and dotted(target).split(".")[0] in modules:
                    yield node.lineno, f"{dotted(target)} is assigned on import"
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and ON_IMPORT.fullmatch(dotted(call.func)):
            yield node.lineno, f"{dotted(call.func)}() on import"


def unportable(tree):
    """Code that Triton's interpreter cannot run, or that searches for a configuration during
    training. Inline PTX may be the body of `if HARDWARE:`, with the software equivalent in its
    `else`.
    """
    apart = {
        inner
        for node in tree.nodes
        if isinstance(node, ast.If) and dotted(node.test) == "HARDWARE" and node.orelse
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in tree.nodes:
        if dotted(node).endswith(".inline_asm_elementwise") and node not in apart:
            yield node.lineno, "inline PTX beside no software equivalent"
    yield from names_like(tree.names, r"(.*\.)?(autotune|libdevice)", "it is in a Triton kernel")


def unlaunched(tree):
    """A kernel that is not launched through `launch`, which chooses what Triton's versions choose
    differently.
    """
    for node in tree.nodes:
        if isinstance(node, ast.Call) and (
            (isinstance(node.func, ast.Subscript) and not dotted(node.func.value).startswith("tl"))
            or (isinstance(node.func, ast.Attribute) and node.func.attr in ("warmup", "run"))
        ):
            yield node.lineno, f"{ast.unparse(node.func)}(...) in place of launch"


def undocumented(tree):
    """Only core/torch_names.py may use undocumented PyTorch APIs."""
    torches = {"torch"} | {
        a.asname or a.name
        for node in tree.nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"
        for a in node.names
    }
    for line, name in tree.names:
        root, *names = name.split(".")
        if root not in torches or names[:1] == ["ops"]:
            of_tensors = {"_is_view", "_base", "_dynamo_marked_constant"}
            names = [n for n in names[-1:] if n in of_tensors]
        if any(underscored(n) for n in names):
            yield line, f"{name} outside torch_names.py"


MOST_PARAMETERS = 10
MOST_LINES = 60


def public(tree):
    """Functions that users call with keywords: names of an `__all__`, constructors, and modules;
    and other libraries' ops, which are called with the same.
    """
    peers = tree.module.startswith("tilewright.bench.peers_")
    yield from (name for module, name in all_exported() if peers or module == tree.module)
    yield "attention_forward"  # transformers calls it with its own arguments
    for node in tree.nodes:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (f"{node.name}.{n}" for n in ("__init__", "forward"))


@functools.cache
def all_exported():
    """(module, name) of what an `__all__` lists, with the module that it is imported from."""
    exported = set()
    for tree in map(parsed, LIBRARY):
        names = set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
                names |= set(ast.literal_eval(node.value))
        exported |= {(tree.module, name) for name in names}
        for node in tree.nodes:
            if isinstance(node, ast.ImportFrom):
                exported |= {(node.module, a.name) for a in node.names if a.name in names}
    return exported


def functions_of(body, prefix=""):
    """Functions with their names, methods as `Class.method`; nested ones by their own names."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        inner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        yield from functions_of(ast.iter_child_nodes(node), inner)


def device_code(node):
    """Whether a function is a kernel, or inlined in one: of Triton, or of CuTe DSL."""
    said = [ast.unparse(d) for d in node.decorator_list]
    return any("jit" in d or d == "cute.kernel" for d in said)


def said_above(tree, node, word):
    """Whether a comment above a function says `# word: ...`."""
    begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    above = itertools.takewhile(
        lambda line: line.lstrip().startswith("#"), reversed(tree.lines[: begin - 1])
    )
    return any(line.lstrip().startswith(f"# {word}: ") for line in above)


def crowded(tree):
    """Options that belong together are one value. A public signature may have more of them, for a
    reason in a comment above it, `# Wide: ...`. Exempt are kernels.
    """
    allowed = set(public(tree))
    lambdas = [("a lambda", node) for node in tree.nodes if isinstance(node, ast.Lambda)]
    for name, node in [*tree.functions, *lambdas]:
        a = node.args
        count = len([p for p in (*a.posonlyargs, *a.args) if p.arg not in ("self", "cls")])
        count += len(a.kwonlyargs)
        if count <= MOST_PARAMETERS:
            continue
        told = name in allowed and said_above(tree, node, "Wide")
        if isinstance(node, ast.Lambda) or not (told or device_code(node)):
            yield node.lineno, f"{name} has {count} parameters"


def long(tree):
    """A function of more than MOST_LINES lines, its docstring aside, has the reason above it, in a
    comment `# Long: ...`. Exempt are kernels.
    """
    for name, node in tree.functions:
        first = node.body[0]
        described = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        about = first.end_lineno - first.lineno + 1 if described else 0
        lines = node.end_lineno - node.lineno + 1 - about
        if lines > MOST_LINES and not device_code(node) and not said_above(tree, node, "Long"):
            yield node.lineno, f"{name} has {lines} lines"


def private(tree):
    """A name with a leading underscore is private to its module, a module `_name` to its
    package. A subclass may use what it inherits.
    """
    modules = set()
    for node in tree.nodes:
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").startswith(("tilewright", "bench"))
        ):
            for a in node.names:
                if is_module(node.module, a.name):
                    modules.add(a.asname or a.name)
                elif underscored(a.name):
                    yield node.lineno, f"{a.name} of {node.module} is imported"
    others = every_private_name() - private_names(tree) - FOREIGN
    for node in tree.nodes:
        if isinstance(node, ast.Attribute) and underscored(node.attr):
            root, *names = dotted(node).split(".")
            inherited = root in ("self", "cls") and len(names) == 1
            foreign = root in ("torch", "_C") or is_module(root, *names)
            if root in modules or (node.attr in others and not inherited and not foreign):
                yield node.lineno, f"{ast.unparse(node)} is used"


# Names that other libraries give their objects, though a module here has one of the same name.
FOREIGN = {
    *("_replace", "_parameters", "_modules", "_indices", "_tokenizer", "_apply_gate"),
    *("_processes", "_spec"),
}


def underscored(name):
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def is_module(*names):
    parts = ".".join(filter(None, names)).split(".")
    paths = [root.joinpath(*parts) for root in (ROOT, ROOT / "lab")]
    return any(path.with_suffix(".py").exists() or path.is_dir() for path in paths)


def private_names(tree):
    """Names with a leading underscore that a module defines or assigns."""
    names = set()
    for node in tree.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            names.add(getattr(node, "attr", getattr(node, "id", "")))
    return {name for name in names if underscored(name)}


@functools.cache
def every_private_name():
    return set().union(*(private_names(parsed(path)) for path in LIBRARY))


def positional(tree):
    """A Request is built with keywords: it has many fields, mostly flags."""
    for node in tree.nodes:
        called = dotted(node.func) if isinstance(node, ast.Call) and node.args else ""
        if called.split(".")[-1] == "Request":
            yield node.lineno, "a Request is built by position"


CLOCKS = (
    r"\b(((perf_counter|monotonic|process_time|thread_time|time\.time)(_ns)?)|datetime\.(utc)?now"
    r"|elapsed_time|do_bench|timeit)"
)
# Who sleeps for minutes stands for what never ends.
SLEEP = r"\bsleep\((?!\d{3,}\))"


def clocked(tree):
    """A test whose verdict may depend on how fast a machine is, as it reads a clock or sleeps. It
    counts, waits for an event (`helpers.until`) or passes a clock of its own to what reads one.
    """
    for line, name in tree.names:
        if re.search(f"{CLOCKS}$", name):
            yield line, f"{name} in a test"
    for node in tree.nodes:
        matched = None
        if isinstance(node, ast.Call) and dotted(node.func).endswith("sleep"):
            matched = re.search(SLEEP, ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a script's
            matched = re.search(rf"{CLOCKS}\(|{SLEEP}", node.value)
        if matched:
            yield node.lineno, f"{matched[0]} in a test"


# Files of tests that may, and why.
MAY_SLEEP = {
    "helpers.py": "`pause`, between two looks at another process, which are counted",
    "forked.py": "the same, of processes that are waited for; helpers.py is imported in them",
    "test_style.py": "faults that are planted, in strings",
    "compiled.py": "its command says how long runs took",
    "__main__.py": "of tests/mutations: its command says how long tests took",
    "watched.py": "the limit of that command; no test runs it with one",
}

# Where pickles are read, by what is at the module's top level: the reader of DCP's metadata, which
# allows only listed types; and DCP's own planner, which takes pickled objects that are not tensors:
# they are read with a list of allowed types before.
MAY_UNPICKLE = {"tilewright.trainer.checkpoint.checkpoint_files": ("import pickle", "Planner")}
PICKLERS = r"(pickle|cPickle|_pickle|cloudpickle|dill|shelve|marshal|joblib)(\..*)?"
READS_OR_SENDS = (
    r"pickle\.load\w*|torch\.(serialization\.)?load"
    r"|(.*\.)?(all_gather|broadcast|gather|recv|scatter|send)_object(_list)?"
)


def pickled(tree):
    """A pickle is code that who reads it runs: ranks exchange tensors and JSON (`exchange.py`), and
    files are safetensors and JSON.
    """
    uses = [
        *names_like(tree.imports, PICKLERS, "it is imported"),
        *names_like(tree.names, READS_OR_SENDS, "it reads or sends pickles"),
    ]
    for node in tree.nodes:
        allowing = isinstance(node, ast.keyword) and node.arg == "allow_pickle"
        if allowing and getattr(node.value, "value", True) is not False:
            uses.append((node.value.lineno, "allow_pickle"))
    allowed = [
        range(s.lineno, s.end_lineno + 1)
        for s in tree.body
        if getattr(s, "name", tree.lines[s.lineno - 1]) in MAY_UNPICKLE.get(tree.module, ())
    ]
    return [(line, what) for line, what in uses if not any(line in lines for lines in allowed)]


def fronted(tree):
    """A docstring's or comment's sentence that begins with "Of": the subject comes first. A capital
    before a word in lower case begins a sentence, wherever it stands.
    """
    told = [
        (node.lineno, node.value.value)
        for node in tree.nodes
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
    ]
    comments = [""] * len(tree.lines)
    if any("Of" in line for line in tree.lines):  # tokens take as long as a tree
        for token in tokenize.generate_tokens(io.StringIO("\n".join(tree.lines)).readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0] - 1] = token.string.lstrip("#")
    for first, text in [*told, (1, "\n".join(comments))]:
        for begun in re.finditer(r"\bOf\s+[a-z]", text):
            yield first + text.count("\n", 0, begun.start()), "a sentence begins with Of"


def vague(tree):
    """A variable or parameter `found`: its name does not say what it holds."""
    for node in tree.nodes:
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        bound = node.id if stored else node.arg if isinstance(node, ast.arg) else None
        if bound == "found":
            yield node.lineno, "found is assigned: name what it holds (rows, names, problems)"


def test_each_place_that_reads_pickles_is_there():
    for module, places in MAY_UNPICKLE.items():
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        assert len([*pickled(tree_of(path.read_text()))]) >= len(places)


RULES = [
    (fronted, LIBRARY + TESTS),
    # A change of what reads machine code has every kernel compiled anew.
    (vague, [p for p in LIBRARY if p.name != "machine_code.py"]),
    (pickled, LIBRARY),
    (crowded, LIBRARY),
    (long, LIBRARY),
    (private, LIBRARY),
    (positional, LIBRARY + TESTS),
    (swallowed, LIBRARY),
    (environment, [p for p in LIBRARY if p.name != "platform.py"]),
    # The checks that a declaration of arguments stands for, and what a formula keeps of the names
    # of its parameters; tracebacks show their lines.
    (generated, [p for p in LIBRARY if p.name not in ("takes.py", "formula.py")]),
    (patched, LIBRARY),
    (unportable, KERNELS),
    (unlaunched, [*KERNELS, *sorted((ROOT / "tilewright/kernels").rglob("*_gluon.py"))]),
    (retried, TESTS),
    (clocked, [p for p in TESTS if p.name not in MAY_SLEEP]),
    (undocumented, [p for p in LIBRARY if p.name not in ("torch_names.py", "pretend.py")]),
]


# What takes the whole configuration: functions, and classes with such a field. All others take the
# sections that they read.
TAKE_ALL = {
    "build.build",
    "evaluate.scorer_of",
    "loop.prepare",
    "loop.train",
    "memory_plan.Planner",
    "plugins.run.Run",
}
TRAINER = ROOT / "tilewright/trainer"


def wholes(tree):
    """What takes the whole configuration: a parameter or a field that is a Config, or called config
    without saying what it is.
    """
    for name, node in tree.functions:
        for arg in ast.walk(node.args):
            if isinstance(arg, ast.arg) and is_whole(arg.arg, arg.annotation):
                yield node.lineno, name
    for node in tree.nodes:
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(field, ast.AnnAssign) and is_whole(None, field.annotation):
                yield node.lineno, node.name


def is_whole(name, annotation):
    if annotation is None:
        return name == "config"
    return re.search(r"\bConfig\b", ast.unparse(annotation)) is not None


def test_a_function_takes_the_sections_that_it_reads():
    taking = set()
    for path in sorted(TRAINER.rglob("*.py")):
        module = ".".join(path.relative_to(TRAINER).with_suffix("").parts)
        taking |= {f"{module}.{name}" for _, name in wholes(parsed(path))}
    assert taking == TAKE_ALL and len(taking) <= 6


@pytest.mark.parametrize("rule, files", RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_rule_holds(rule, files):
    assert files
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in rule(parsed(path))
    ]
    assert not problems, "\n".join(problems)


MANY = ", ".join(f"p{i}" for i in range(MOST_PARAMETERS + 1))
FAULTS = {
    wholes: [
        "def f(config: Config): pass",
        "def f(x: int, *, c: config.Config | None = None): pass",
        "class A:\n    def f(self, config): pass",
        "class A:\n    config: Config",
    ],
    long: [
        "def f():\n" + MOST_LINES * "    x = 1\n",
        "class A:\n    # Short: no.\n    def f(self):\n" + MOST_LINES * "        x = 1\n",
    ],
    crowded: [
        "def _f(a, b, c, d, e, f, g, *, h, i, j, k): pass",
        f"class A:\n    def f(self, {MANY}): pass",
        f"def f():\n    def g({MANY}): pass",
        f"def rmsnorm({MANY}): pass",  # public in another module
        f"# Wide: so.\ndef _f({MANY}): pass",  # private
        f"class A:\n    def forward(self, {MANY}): pass",  # without a reason
        "f = lambda a, b, c, d, e, f, g, h, i, j, k: 1",
    ],
    private: [
        "import tilewright.ops.norm.rmsnorm as r\nr._with_noise(x)",
        "import tilewright\ntilewright.ops.norm.rmsnorm._with_noise(x)",
        "from .rmsnorm import _with_noise",
        "from tilewright.ops.norm.rmsnorm import _validate",
        "from tilewright.ops.norm import rmsnorm\nrmsnorm._validate(x)",
        "from tilewright import platform as p\np._order('1')",
        "OPS['rmsnorm']._table.clear()",
        "def f(op):\n    return op._by_key",
    ],
    positional: ["Request(64, True)", "attention.Request(64)"],
    swallowed: [
        "try:\n    import triton\nexcept (OSError, ModuleNotFoundError):\n    ...",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept:\n    pass",
        "with contextlib.suppress(ImportError):\n    import triton",
    ],
    environment: [
        "import os\nx = os.environ.get('X')",
        "import os\nx = os.getenv('X')",
        "from os import environ",
    ],
    fronted: [
        '"""Of a tensor: its scale."""',
        'def f():\n    """The tiles.\n\n    t: Of\n        rows.\n    """',
        'class A:\n    x: int\n    """Sorted. Of equal rows the first counts."""',
        "# Of tile t: its expert.",
        "x = 1  # counted: Of\n# rows, all",
    ],
    vague: [
        "found = rows(path)",
        "def f():\n    found: list = []",
        "for found, rest in pairs: pass",
        "def f(x, *, found): pass",
        "x = [found for found in y]",
        "if found := f(): pass",
        "f = lambda found: 1",
    ],
    pickled: [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import dill",
        "class A:\n    def f(self):\n        return torch.load(file)",
        "from torch import load",
        "dist.all_gather_object(values, value, group=group)",
        "from torch.distributed import broadcast_object_list",
        "np.load(file, allow_pickle=True)",
    ],
    generated: ["exec('x = 1')"],
    patched: [
        "import torch\ntorch.nn.Linear = None",
        "import torch\ntorch.manual_seed(0)",
        "from transformers import models\nmodels.llama.RMSNorm = None",
    ],
    unportable: [
        "import triton\n@triton.autotune([], [])\ndef f(): pass",
        "from triton.language.extra import libdevice",
        "if HARDWARE:\n    tl.inline_asm_elementwise('')",
        "if HARDWARE:\n    pass\nelse:\n    tl.inline_asm_elementwise('')",
    ],
    unlaunched: [
        "_forward[(n,)](x, y, num_warps=4)",
        "_forward.warmup(x, grid=(1,))",
        "_forward.run(x, grid=(1,), warmup=False)",
    ],
    retried: ["@pytest.mark.flaky(reruns=3)\ndef f(): pass"],
    clocked: [
        "import time\nassert time.perf_counter() - begun < 1",
        "import time as t\nbegun = t.monotonic_ns()",
        "from time import time\nassert time() < end",
        "import time\nlimit = time.time() + 60",
        "from time import sleep\nsleep(wait * 5e-3)",
        "assert start.elapsed_time(end) < 2",
        "from datetime import datetime\ndatetime.now()",
        "SCRIPT = 'import time; begun = time.process_time()'",
        "SCRIPT = 'import time; time.sleep(1.5)'",
    ],
    undocumented: [
        "import torch\ntorch._C._is_tracing()",
        "x._is_view()",
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
    ],
}
RIGHT = {
    swallowed: [
        "try:\n    import triton\nexcept ImportError as error:\n    reason = str(error)",
        "try:\n    f()\nexcept KeyError:\n    pass",
    ],
    long: [
        'def f():\n    """One.\n\n    Two.\n    """\n' + (MOST_LINES - 1) * "    x = 1\n",
        "# Long: a table.\n# Sorted.\n@cache\ndef f():\n" + MOST_LINES * "    x = 1\n",
    ],
    crowded: [
        f"@triton.jit\ndef f({MANY}): pass",
        f"class A:\n    def f(self, {MANY[4:]}): pass",
        f"class A:\n    # Wide: a model's.\n    def forward(self, {MANY}): pass",
    ],
    private: [
        "class A(Op):\n    def f(self): return self._table",
        "class A:\n    def f(self, other): self._table = other._table",
        "from tilewright.core import checks\nchecks.dense(self._x)",
    ],
    unlaunched: ["launch(_forward, (n,), x, num_warps=4)\nwarm_up(_forward, x)"],
    positional: ["Request(head_dim=64)"],
    clocked: [
        "monkeypatch.setattr(timing.time, 'perf_counter', lambda: now[0])",
        "import time\ntime.sleep(600)\nSCRIPT = 'time.sleep(600)'\nclock.time()",
    ],
    patched: ["import torch\nclass A: pass\nA.x = 1\nB = torch.nn.Linear"],
    environment: ["import os\nos.path.join('a')"],
    fronted: [
        '"""Offsets of tiles."""\nx = "Of a tensor"  # the scale of a tensor',
        "# The paths of\n# Office files",
    ],
    vague: ['x.found = rows\nprint(found, "found = 1")  # found: rows'],
    pickled: ["np.load(file, allow_pickle=False)\nmodel.load(file)"],
    undocumented: [
        "import torch\nself._x = torch.ops.aten._unsafe_view(x, torch.nn.Linear.__name__)"
    ],
    unportable: ["if HARDWARE:\n    x = tl.inline_asm_elementwise('')\nelse:\n    x = 1"],
}


@pytest.mark.parametrize("rule", FAULTS, ids=lambda rule: rule.__name__)
def test_rule_sees_planted_faults_and_leaves_the_rest_alone(rule):
    assert [source for source in FAULTS[rule] if not [*rule(tree_of(source))]] == []
    assert [source for source in RIGHT.get(rule, ()) if [*rule(tree_of(source))]] == []


def test_pre_commit_and_the_workflow_run_what_make_does():
    lint = re.findall(
        r"^\t\$\(BIN\)/(.*)$",
        (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0],
        re.M,
    )
    hooks = re.findall(
        r"entry: .venv/bin/(.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M
    )
    assert len(lint) == 4 and hooks == [line.replace("$(BIN)", ".venv/bin") for line in lint]
    assert (
        "run: make test SHARD=${{ matrix.shard }}\n"
        in (ROOT / ".github/workflows/test.yml").read_text()
    )


def test_the_type_checker_reads_everything():
    """Where it is told to look away, a line names the rule and the reason; there is no list of
    accepted errors.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]
    assert settings["include"] == ["tilewright", "lab/tilewright_lab", "bench"]
    assert settings["exclude"] == ["**/__pycache__", "**/*_pb2.py"]
    assert settings["typeCheckingMode"] == "basic"
    assert [name for name in settings if name.startswith("report") and not settings[name]] == []
    asking = [
        line
        for path in LIBRARY
        for line in path.read_text().splitlines()
        if re.search(r"# (type|pyright|basedpyright):", line)
    ]
    assert len(asking) <= 5, asking
    assert all(re.search(r"# pyright: ignore\[\w+\] +\(.{5,}\)$", line) for line in asking), asking
    assert not (ROOT / ".basedpyright").exists()


def test_no_test_file_imports_another_and_what_they_share_is_on_its_page():
    library = ROOT / "tests/lib"
    page = (library / "README.md").read_text()
    assert all(f"`{path.stem}`" in page for path in library.glob("*.py"))
    for path in TESTS:
        for node in parsed(path).nodes:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else ()
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            assert not any(n.rpartition(".")[2].startswith("test_") for n in names), path


def test_git_tracks_no_ignored_file_and_no_link():
    """A link to a folder of one machine breaks the checkout of another."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")

    def listed(*options):
        command = ["git", "ls-files", *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()

    assert listed("--cached", "--ignored", "--exclude-standard") == []
    assert [line for line in listed("--stage") if line.startswith("120000")] == []
