"""Fixed order: a row's sums are made in an order that nothing beside it chooses, neither how many
rows are computed with it nor what they hold. Settled once, on the modules, when an engine is
built.

Every product then runs in tiles that follow from its matrix alone, and latent attention has one
form for prompts and decodes, so that a position's cache row is the same whichever wrote it. The
attention's part is in its plans (`PlanLimits`)."""

from torch import nn

from vitrail.layers.attention import ONE_FORM, MlaForms


def fix_order(model: nn.Module) -> None:
    """Every module of `model` that has a choice, from now on. Before its sites are asked for."""
    for module in model.modules():
        choices: dict[str, object] = {}
        if hasattr(module, "fixed"):
            choices["fixed"] = True
        if isinstance(getattr(module, "forms", None), MlaForms):
            choices["forms"] = ONE_FORM
        vars(module).update(choices)
