"""Search the source for calls that could execute untrusted content and are not in the list of allowed ones.

Names are resolved through imports. A module that unpickles or runs code may be imported only in the files listed in
`ADMITTED`. A function with a name such as "load" must belong to fedlas, be listed in `SAFE`, or be called with the
argument required by `GUARDED`. A module with a computed name may be imported only in the calls listed in `ADMITTED`.
"""

import ast
import re

# Module names that can execute the content they read.
PICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "runpy", "yaml"}
PICKLING |= {"ruamel", "jsonpickle", "hickle"}
MODULES = (
    "builtins",
    "importlib.machinery",
    "multiprocessing.connection",
    "multiprocessing.managers",
    "torch.distributed.checkpoint",
    "torch.hub",
    "torch.jit",
    "torch.package",
    "torch.serialization",
    "torchvision.datasets",
    "zipimport",
)
WORDS = {"load", "loads", "unpickle", "unpickler", "pickle", "deserialize", "recv", "hdf", "exec"}
NAMES = {"run_path", "run_module", "NpzFile", "read_array", "add_safe_globals", "safe_globals"}
NAMES |= {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "recv_object_list"}
BUILT_IN = {"exec", "eval", "compile", "__import__", "__builtins__", "os.system", "os.popen"}
# Calls that are safe with a keyword, which must be given explicitly.
GUARDED = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "numpy.lib.format.read_array": ("allow_pickle", False),
    "timm.create_model": ("pretrained", False),
}
SAFE = {
    "huggingface_hub.try_to_load_from_cache",
    "json.load",
    "json.loads",
    "safetensors.torch.load",
    "safetensors.torch.load_file",
    "sklearn.datasets.load_digits",
    "tomllib.load",
    "tomllib.loads",
    "triton.language.load",
}
SAFE_METHODS = {"load_state_dict", "_load_from_state_dict"}  # take data that has been read already
IMPORTERS = {"import_module", "optional_module", "_import_tracker"}  # take a module name
# Imports, names and calls that are allowed in single files.
ADMITTED = {
    # the only unpickler: requires a checksum and allows three names; tests/data/test_data_formats.py attacks it
    "data/base/formats.py": {"import pickle", "pickle.Unpickler", "_PlainUnpickler", "_PlainUnpickler().load"},
    # the only reader of exported programs, which loads only tensors (`test_exported_program_is_not_unpickled`)
    "integrations/export.py": {"torch.export.load", "optional_module(package, 'integrations')"},
    # an unpickler that resolves names in a table and imports nothing, and replacements for two functions of numpy;
    # tests/faults/test_hostile_files.py attacks it
    "io/torch.py": {
        "import pickle",
        "pickle._Unpickler",
        "pickle._Unpickler.dispatch",  # to exclude BUILD, which could set class attributes
        "pickle.BUILD",
        "pickle.BYTEARRAY8",  # to reject it, as it allocates any number of bytes
        "pickle.UnpicklingError",  # an error
        "unpickler.load",
        "_Sizes().load",
        "torch.serialization.safe_globals",
    },
    # a type
    "io/npz.py": {"numpy.lib.npyio.NpzFile"},
    # messages between processes that the executor started
    "experiments/executors/local.py": {
        "import multiprocessing.connection.Connection",
        "import multiprocessing.connection.wait",
        "multiprocessing.connection.Connection",
        "multiprocessing.connection.wait",
        "pipe.recv",
        "worker.pipe.recv",
    },
    "integrations/base.py": {"torch.distributed.all_gather_object"},
    "metrics/accumulators.py": {"torch.distributed.all_gather_object"},
    "training/distributed.py": {
        "torch.distributed.all_gather_object",
        "torch.distributed.broadcast_object_list",
        "importlib.import_module(FUNCTIONAL)",
    },
    # cache folder of weights and downloaded bytes; timm builds a network with the options of a recipe
    "models/pretrained.py": {
        "torch.hub.download_url_to_file",
        "torch.hub.get_dir",
    },
    "models/timm.py": {"timm.create_model"},
    # modules of fedlas, and optional packages
    "lazy_imports.py": {"import_module(f'{package}.{name}')", "import_module(f'{package}.{modules[name]}')"},
    "catalog.py": {
        "importlib.import_module(self.package)",
        "importlib.import_module(f'{self.package}.{file.name}')",
    },
    "extras.py": {"importlib.import_module(name)"},
    "integrations/lightning.py": {"import_module(name)"},
    "integrations/trackers.py": {"importlib.import_module(name)"},
}
SHORT = {"np": "numpy", "pd": "pandas"}  # common import aliases


class Search:
    """Collect the suspicious names and calls in one file."""

    def __init__(self, text: str, where: str) -> None:
        self.tree, self.where, self.findings = ast.parse(text), where, []
        self.nodes = list(ast.walk(self.tree))
        self.names = dict(SHORT)
        self.defined = {node.name for node in self.nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)} | {
            "self",
            "cls",
        }
        self.calls = {id(node.func): node for node in self.nodes if isinstance(node, ast.Call)}
        self.parts = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}

    def report(self, node: ast.AST, message: str) -> None:
        self.findings.append(f"{self.where}:{node.lineno} {message}")

    def full(self, node: ast.expr) -> str:
        """Return the qualified name of an expression, or a question mark."""
        if isinstance(node, ast.Attribute):
            return f"{self.full(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Call):
            return self.imported(node) or f"{self.full(node.func)}()"
        return "?"

    def imported(self, node: ast.Call) -> str | None:
        """Return the module that a call imports."""
        if self.full(node.func).rpartition(".")[2] not in IMPORTERS or not node.args:
            return None
        return text_of(node.args[0])

    def admitted(self, name: str) -> bool:
        return name in ADMITTED.get(self.where, set())

    def imports(self) -> None:
        """Check the imports of the file."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for item in node.names:
                    top = item.name.partition(".")[0]
                    self.names[item.asname or top] = item.name if item.asname else top
                    self.module(node, item.name)
            elif isinstance(node, ast.ImportFrom):
                for item in node.names:
                    full = f"{node.module}.{item.name}"
                    self.names[item.asname or item.name] = full
                    if item.name == "*":
                        self.report(node, f"all names from {node.module}")
                    self.module(node, full)

    def module(self, node: ast.AST, name: str) -> None:
        """Check a module or a name imported from it."""
        if suspect(name) and not self.admitted(f"import {name}"):
            self.report(node, f"imports {name}")

    def look(self) -> list[str]:
        """Return everything that is not known to be safe."""
        self.imports()
        for node in self.nodes:
            if isinstance(node, ast.Call):
                self.call(node)
            if isinstance(node, ast.Subscript) and risky(text_of(node.slice) or ""):
                self.report(node, ast.unparse(node))
            outermost = id(node) not in self.parts
            if isinstance(node, ast.Attribute | ast.Name) and outermost and isinstance(node.ctx, ast.Load):
                self.name(node)
        return self.findings

    def call(self, node: ast.Call) -> None:
        """Check the arguments of a call."""
        name = self.full(node.func)
        last = name.rpartition(".")[2]
        if last in IMPORTERS and node.args:
            if (module := self.imported(node)) is not None:
                self.module(node, module)
            elif not in_fedlas(node.args[0]) and not self.admitted(ast.unparse(node)):
                self.report(node, f"imports a computed name: {ast.unparse(node)}")
        if last in {"getattr", "attrgetter", "methodcaller"}:
            texts = [text_of(argument) for argument in node.args[:2]]
            if any(text and risky(text) for text in texts):
                self.report(node, f"{name} of {texts}")
            if len(texts) == 2 and texts[1] is None and self.module_name(node.args[0]):
                self.report(node, f"{name} of a module with a computed name")
        for option, value in dict(GUARDED.values()).items():
            for keyword in node.keywords:
                if keyword.arg == option and option != "pretrained" and not is_constant(keyword.value, value):
                    self.report(node, f"{name} without {option}={value}")

    def module_name(self, node: ast.expr) -> bool:
        """Return whether an expression is a module outside of fedlas."""
        return isinstance(node, ast.Name) and self.names.get(node.id, "") in {"torch", "numpy", "pandas", "os"}

    def name(self, node: ast.Attribute | ast.Name) -> None:
        """Check a name, whether it is called or passed on."""
        name = self.full(node)
        if self.admitted(name):
            return
        if name in GUARDED:
            keyword, value = GUARDED[name]
            keywords = self.calls[id(node)].keywords if id(node) in self.calls else []
            if not any(item.arg == keyword and is_constant(item.value, value) for item in keywords):
                self.report(node, f"{name} without {keyword}={value}")
        elif name in BUILT_IN or suspect(name):
            self.report(node, name)
        elif risky(name) and not self.known(name):
            self.report(node, f"{name}, which is not known to be safe")

    def known(self, name: str) -> bool:
        """Return whether a loading function belongs to fedlas or is known to be safe."""
        first, *rest = name.split(".")
        trusted = first == "fedlas" or (first in self.defined and len(rest) <= 1)
        trusted = trusted and "Unpickler" not in name and {"torch", "np"}.isdisjoint(rest)
        return trusted or name in SAFE or name.rpartition(".")[2] in SAFE_METHODS


def suspect(name: str) -> bool:
    """Return whether a name belongs to a module that can execute what it reads."""
    within = any(name == module or name.startswith(f"{module}.") for module in MODULES)
    return within or not PICKLING.isdisjoint(name.split("."))


def risky(name: str) -> bool:
    """Return whether the last part of a name suggests a loading function."""
    last = name.rpartition(".")[2]
    words = {text.lower() for text in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", last)}
    return last in NAMES or not WORDS.isdisjoint(words)


def text_of(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def in_fedlas(node: ast.expr) -> bool:
    """Return whether a computed name begins with the name of this package."""
    return isinstance(node, ast.JoinedStr) and (text_of(node.values[0]) or "").startswith("fedlas.")


def dangers(text: str, where: str) -> list[str]:
    """Return the calls and references in a file that could execute untrusted content."""
    return Search(text, where).look()
