"""Cross references that Sphinx can't resolve by itself: our names under their modules,
and other projects' names.

Inventories of other projects would have to be fetched, but the site builds offline. So
their addresses are formed here.
"""

import importlib
from typing import Any

import pyro_symmetric as ps

TORCH = "https://docs.pytorch.org/docs/stable/"
PYRO = "https://docs.pyro.ai/en/stable/"
PYTHON = "https://docs.python.org/3/library/"
SHORT = {  # names as annotations give them
    "Tensor": "torch.Tensor",
    "nn.Module": "torch.nn.Module",
    "AutoGuide": "pyro.infer.autoguide.AutoGuide",
    "AutoNormalizingFlow": "pyro.infer.autoguide.AutoNormalizingFlow",
    "TorchDistribution": "pyro.distributions.TorchDistribution",
    "ExpandedDistribution": "pyro.distributions.torch_distribution.ExpandedDistribution",
    "Constraint": "torch.distributions.constraints.Constraint",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch._C.Generator": "torch.Generator",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "torch.distributions.distribution.Distribution": "torch.distributions.Distribution",
    "pyro.infer.autoguide.guides.AutoGuide": "pyro.infer.autoguide.AutoGuide",
    "pyro.infer.autoguide.guides.AutoContinuous": "pyro.infer.autoguide.AutoContinuous",
    "pyro.distributions.torch_distribution.TorchDistribution": "pyro.distributions.TorchDistribution",
    "concurrent.futures._base.Executor": "concurrent.futures.Executor",
}
PAGES = {  # beginnings of names -> the page that has them, under an anchor of the name
    "torch.Tensor": TORCH + "tensors.html",
    "torch.Size": TORCH + "size.html",
    "torch.dtype": TORCH + "tensor_attributes.html",
    "torch.device": TORCH + "tensor_attributes.html",
    "torch.optim.Optimizer": TORCH + "optim.html",
    "torch.distributions.": TORCH + "distributions.html",
    "torch.": TORCH + "generated/{}.html",
    "pyro.infer.autoguide.": PYRO + "infer.autoguide.html",
    "pyro.infer.": PYRO + "inference_algos.html",
    "pyro.distributions.": PYRO + "distributions.html",
    "collections.abc.": PYTHON + "collections.abc.html",
    "concurrent.futures.": PYTHON + "concurrent.futures.html",
    "pathlib.": PYTHON + "pathlib.html",
    "os.": PYTHON + "os.html",
    "abc.": PYTHON + "abc.html",
    "format": PYTHON + "functions.html",
}


def resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A link, or plain text for what exists but has no page of its own; ``None``, a
    warning, for what doesn't exist.
    """
    from docutils import nodes

    target = SHORT.get(node["reftarget"], node["reftarget"])
    name = target.rsplit(".", 1)[-1]
    for beginning, page in PAGES.items():
        if target.startswith(beginning):
            address = page.format(target) if "{}" in page else f"{page}#{target}"
            return nodes.reference("", "", content, internal=False, refuri=address)
    known = name in ps.__all__
    if known and (target == name or target.startswith("pyro_symmetric.")):
        page = f"reference/api/pyro_symmetric.{name}"
        address = app.builder.get_relative_uri(node["refdoc"], page)
        return nodes.reference(
            "", "", content, internal=True, refuri=f"{address}#pyro_symmetric.{name}"
        )
    return (
        content
        if _alias(target) or any(_exists(f"{place}{target}") for place in _places(node))
        else None
    )


def _places(node: Any) -> list[str]:
    """Where a name may stand, from the outside in: at the top, and in all that holds
    the docstring.
    """
    _, _, holder = (node.source or "").partition("docstring of ")
    parts = holder.split(".") if holder else [node.get("py:module") or "pyro_symmetric"]
    return ["", *[".".join(parts[:count]) + "." for count in range(1, len(parts) + 1)]]


def _alias(name: str) -> bool:
    """Whether it is a type's name in an annotation, of a module of ours."""
    return name.isidentifier() and name[0].isupper()


def _exists(path: str) -> bool:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            annotated = getattr(thing, "__annotations__", {})
            if part in annotated or part in getattr(thing, "__dataclass_fields__", {}):
                return True
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False
