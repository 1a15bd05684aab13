"""The bars of manner: names, comments, docstrings, classes, and what is never called."""

import ast
import re

from tests.architecture.source import Findings, Source, decorators, dotted, imports, public

ATTICS = {"util", "utils", "common", "helper", "helpers", "misc", "base", "manager", "tools"}
VERSION_SUFFIX = re.compile(r"_(v\d+|new|old|ex)$")
BANNER = re.compile(r"^\s*#\s*[-=#*~]{3,}")
UNNUMBERED_TODO = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b(?!.*#\d)")
VENDORS = re.compile(r"(torch\.(cuda|npu)|torch_npu)\b")
# What can run code that came with data, or writes files that only such a reader can read.
EXECUTING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# How often a module encodes or decodes whole texts: documents, prompts, probes.
WHOLE_TEXTS = {
    "kitforge.data.tokenizers.added_tokens": 1,
    "kitforge.data.chat.datasets": 1,
    "kitforge.data.tokenizers.gguf": 1,
    "kitforge.data.text.streaming": 1,
    "kitforge.data.text.tagged_words": 1,
    "kitforge.data.text.answers": 4,
    "kitforge.data.text.masking": 1,
    "kitforge.kits.transformers.masked_lm": 3,
    "kitforge.data.chat.template": 1,
    "kitforge.data.text.tokenize_documents": 1,
    "kitforge.data.tokenizers.protocol": 1,
    "kitforge.inference.server.service": 2,
    "kitforge.kits.rlhf.reinforcement.rollout_log": 3,
    "kitforge.kits.rlhf.roles.prompt_completion": 1,
    "kitforge.kits.rlhf.roles.rewards": 2,
    "kitforge.kits.transformers.build": 1,
    "kitforge.kits.transformers.evaluation": 1,
    "kitforge.kits.transformers.seq2seq": 1,
    "kitforge.verify.learning": 1,
}
NETWORKS = {"Decoder", "Encoder", "EncoderDecoder", "VisionTransformer"}
# The places that ask for the class of a network or of its configuration.
ASKED = {
    "kitforge.kits.transformers.labelling": {"Encoder"},
    "kitforge.kits.transformers.programs": {"EncoderDecoder", "VisionTransformer"},
}
# What runs code of completions, and its tests, in processes apart from all else.
SANDBOX = "kitforge.kits.rlhf.roles.code_worker"
EXECUTING_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load", "os.system"}


def module_names(sources: list[Source]) -> Findings:
    """No attic, no version suffix."""
    for source in sources:
        for part in source.module.split("."):
            if part in ATTICS or VERSION_SUFFIX.search(part):
                yield f"{source.path}: a module is named after what it holds, not {part!r}"


def comments(sources: list[Source]) -> Findings:
    """No banners, and no promise without the number of its issue."""
    for source in sources:
        for number, line in enumerate(source.text.splitlines(), 1):
            if BANNER.search(line) or UNNUMBERED_TODO.search(line):
                yield f"{source.path}:{number} {line.strip()}"


def docstrings(sources: list[Source]) -> Findings:
    """Modules, what is public in them and its methods; a method inherits that of the one which it overrides, and the
    function of an operation that of the operation's protocol."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in (node for source in sources for node in source.nodes if isinstance(node, ast.ClassDef)):
        classes.setdefault(node.name, []).append(node)
    protocols = {name.lower() for name in classes if name.endswith("Kernel")}
    for source in sources:
        if not ast.get_docstring(source.tree):
            yield f"{source.path} says nothing of its borders"
        for node in public(source.tree.body):
            # Kernels keep the protocol of their reference.
            is_open = isinstance(node, ast.ClassDef) and not source.is_kernel
            named = [node, *(public(node.body) if is_open else ())]
            for each in named:
                is_setter = any(dotted(item).endswith(".setter") for item in each.decorator_list)
                is_operation = source.is_kernel and f"{each.name.replace('_', '')}kernel" in protocols
                is_said = is_setter or is_operation or (each is not node and says(node, each.name, classes))
                if not (is_said or ast.get_docstring(each)):
                    yield f"{source.at(each)} {each.name} has no docstring"


def says(node: ast.AST, method: str, classes: dict[str, list[ast.ClassDef]]) -> bool:
    """Whether a base of a class documents a method."""
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in getattr(node, "bases", ()))
    found = [each for base in bases for each in classes.get(dotted(base).rsplit(".", 1)[-1], ()) if each is not node]
    return any(
        says(base, method, classes)
        or any(each.name == method and ast.get_docstring(each) for each in public(base.body))
        for base in found
    )


def options(sources: list[Source]) -> Findings:
    """Options are frozen, slotted, keyword-only dataclasses (or the protocol of such)."""
    wanted = {"frozen", "slots", "kw_only"}
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Options")) and not is_abstract(node):
                call = decorators(node).get("dataclass")
                given = call.keywords if isinstance(call, ast.Call) else []
                true = {item.arg for item in given if isinstance(item.value, ast.Constant) and item.value.value is True}
                if not wanted <= true:
                    yield f"{source.at(node)} {node.name} is not a frozen, slotted, keyword-only dataclass"


def inheritance(sources: list[Source]) -> Findings:
    """A class of ours is abstract or final: nothing inherits from one that can be made.

    Errors are a drawn tree, and a dataclass may be extended: it has fields, no behaviour to override.
    """
    concrete = {
        f"{source.module}.{node.name}"
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
        if not (node.name.endswith("Error") or is_abstract(node) or "dataclass" in decorators(node))
    }
    for source in sources:
        ours = {name.rsplit(".", 1)[-1]: name for name, _ in imports(source.nodes) if name in concrete}
        for node in (item for item in source.nodes if isinstance(item, ast.ClassDef)):
            for base in map(dotted, node.bases):
                if ours.get(base) or f"{source.module}.{base}" in concrete:
                    yield f"{source.at(node)} {node.name} inherits from {base}, which is not abstract"


def is_abstract(node: ast.ClassDef) -> bool:
    """Whether it says so: by its base, or by a method that is left to others."""
    bases = {dotted(base.value if isinstance(base, ast.Subscript) else base).rsplit(".", 1)[-1] for base in node.bases}
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    return bool(bases & {"ABC", "Protocol"}) or any("abstractmethod" in decorators(item) for item in methods)


def pass_through(sources: list[Source]) -> Findings:
    """`**kwargs` is handed on whole or not taken at all; anything else is a hidden parameter."""
    for source in sources:
        for node in source.functions:
            if node.args.kwarg is None:
                continue
            name = node.args.kwarg.arg
            uses = [item for item in ast.walk(node) if isinstance(item, ast.Name) and item.id == name]
            calls = [item for item in ast.walk(node) if isinstance(item, ast.Call)]
            handed_on = [part for call in calls for part in (*call.args, *(item.value for item in call.keywords))]
            if not uses or not all(use in handed_on for use in uses):
                yield f"{source.at(node)} {node.name} reads **{name}"


def prints(sources: list[Source]) -> Findings:
    for source in sources:
        for name, node in source.calls:
            if name in {"print", "rich.print", "pprint", "pprint.pprint"}:
                yield f"{source.at(node)} {name}()"


def vendor_modules(sources: list[Source]) -> Findings:
    """`torch.cuda` and `torch_npu` are named in one file; everyone else calls what it offers."""
    for source in sources:
        if source.module == "kitforge.foundation.device":
            continue
        named = [(dotted(node), node) for node in source.nodes if isinstance(node, (ast.Attribute, ast.Name))]
        for name, node in (*named, *imports(source.nodes)):
            if VENDORS.match(name):
                yield f"{source.at(node)} {name}"


def home_folders(sources: list[Source]) -> Findings:
    """`~` is resolved by `foundation.files.user_path`, which tells a person of a user that does not exist."""
    for source in sources:
        for name, node in source.calls:
            is_path = not name.startswith("os.") and name.endswith(".expanduser")
            if source.module != "kitforge.foundation.files" and (is_path or name == "Path.home"):
                yield f"{source.at(node)} {name}()"


def executed_data(sources: list[Source]) -> Findings:
    """Nothing that comes with data is executed: no pickle in any dress, no unsafe YAML, no eval."""
    for source in sources:
        for name, imported in imports(source.nodes):
            if name.split(".")[0] in EXECUTING_MODULES or name in EXECUTING_CALLS:
                yield f"{source.at(imported)} import of {name}"
        for name, call in source.calls:
            read = {"Loader", "allow_pickle"}
            keywords = {item.arg: ast.unparse(item.value) for item in call.keywords if item.arg in read}
            unsafe_yaml = name == "yaml.load" and "Safe" not in keywords.get("Loader", "")
            is_executing = name in EXECUTING_CALLS and (source.module, name) != (SANDBOX, "exec")
            if is_executing or unsafe_yaml or keywords.get("allow_pickle") == "True":
                yield f"{source.at(call)} {name}()"


def network_checks(sources: list[Source]) -> Findings:
    """Outside of `models` nobody asks for the class of a network or of its configuration: it asks for a capability,
    such as `CausalLM`. ASKED, the places that still do, only gets shorter."""
    for source in (each for each in sources if not each.module.startswith("kitforge.models.")):
        files = {name: name.split(".") for name, _ in imports(source.nodes) if name.startswith("kitforge.models.")}
        own = {parts[-1] for parts in files.values() if parts[3:4] == ["model"]}
        left = set(ASKED.get(source.module, ()))
        calls = [node for name, node in source.calls if name in {"isinstance", "issubclass"}]
        classes = [part for call in calls for argument in call.args[1:] for part in ast.walk(argument)]
        patterns = [node.cls for node in source.nodes if isinstance(node, ast.MatchClass)]
        for node in (*classes, *patterns):
            name = dotted(node).rsplit(".", 1)[-1] if isinstance(node, (ast.Name, ast.Attribute)) else ""
            if name in (NETWORKS | own) - set(ASKED.get(source.module, ())):
                yield f"{source.at(node)} asks for a network, {name}"
            left.discard(name)
        yield from (f"{source.path} asks no more for {name}: take it out of ASKED" for name in left)


def local_tensors(sources: list[Source]) -> Findings:
    """DTensors become plain tensors and back in one gate, the only place where a gradient could go silent."""
    gates = {"to_local", "from_local"}
    places = [(source, node) for source in sources for name, node in source.calls if name.rsplit(".", 1)[-1] in gates]
    if len({source.path for source, _ in places}) > 1:
        yield from (f"{source.at(node)} is a second gate" for source, node in places)


def parts_of_texts(sources: list[Source]) -> Findings:
    """Part of a text is encoded and decoded by `data.continuation` alone, as it loses or gains a space elsewhere."""
    for source in sources:
        if source.module in ("kitforge.data.text.continuation", "kitforge.data.tokenizers.huggingface"):
            continue
        places = [
            node
            for name, node in source.calls
            if re.search(r"(^|\.)(\w*tokenizer|_own)\.(encode|decode|encode_array)$", name)
        ]
        if len(places) > WHOLE_TEXTS.get(source.module, 0):
            yield from (f"{source.at(node)} encodes or decodes a text: a whole one, for once?" for node in places)
