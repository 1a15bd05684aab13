"""Parameter groups: weight decay and eligibility for Muon, by the dims and names of parameters, never by classes."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from kitforge.foundation.errors import ModelError, nearest

# Weight decay, matrix, part, learning rate and maximal gradient norm of a group.
GroupKind = tuple[float, bool, str, float | None, float | None]


# The ends of their names, `query_position.weight` of PanGu-alpha among them.
_TABLES = ("embedding.weight", "position.weight", "token_type.weight", "relative.weight", "output")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterGroup:
    """Parameters with one weight decay and learning rate; `names[i]` is the name of `parameters[i]`."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    weight_decay: float
    matrix: bool  # hidden 2-D weights, eligible for Muon
    # Groups of one part, such as the policy or the critic, share a gradient norm, by which they are clipped.
    part: str = ""
    learning_rate: float | None = None  # the peak; None: the optimizer's
    max_grad_norm: float | None = None  # of the part's gradients; None: the run's

    @property
    def kind(self) -> GroupKind:
        """Everything but the parameters, which ranks with other layers have as well."""
        return (self.weight_decay, self.matrix, self.part, self.learning_rate, self.max_grad_norm)


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
    no_decay: Collection[str] = (),
    heads: Collection[str] = (),
) -> list[ParameterGroup]:
    """Sort parameters into at most three groups: matrices, other decayed weights, the rest.

    - Weights with two or more dims decay, unless `no_decay` lists them (the kit lists its embeddings there).
    - Biases, norm weights and others with fewer than two dims do not decay.
    - `matrix` marks the decayed 2-D weights that are not output heads; `heads` lists those.
    - A tied parameter occurs once, under its first name, and is listed if any of its names is; pass
      `model.named_parameters(remove_duplicate=False)` to include all of them.
    - Frozen parameters are left out.

    Raises ModelError for a listed name that no parameter has, since a typo would decay an embedding unnoticed.
    """
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named_parameters:
        aliases.setdefault(parameter, []).append(name)
    known = {name for names in aliases.values() for name in names}
    for name in sorted({*no_decay, *heads} - known):
        raise ModelError(
            f"no parameter is called {name!r}",
            got=f"{name!r} in no_decay or heads",
            expected="names of the model's parameters (all names of a tied one: remove_duplicate=False)",
            fix=nearest(name, known),
        )

    members: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {
        (True, True): [],
        (True, False): [],
        (False, False): [],
    }
    for parameter, names in aliases.items():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and not any(name in no_decay for name in names)
            is_matrix = decays and parameter.ndim == 2 and not any(name in heads for name in names)
            members[decays, is_matrix].append((names[0], parameter))
    return [
        ParameterGroup(
            names=tuple(name for name, _ in group),
            parameters=tuple(parameter for _, parameter in group),
            weight_decay=weight_decay if decays else 0.0,
            matrix=is_matrix,
        )
        for (decays, is_matrix), group in members.items()
        if group
    ]


def table_names(model: nn.Module) -> list[str]:
    """The tables of tokens and positions of a network, biases by distance and output heads: nothing of them decays."""
    return [name for name, _ in model.named_parameters() if name.endswith(_TABLES)]


def network_groups(model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Matrices decay; tables, see `table_names`, norms and biases do not. Muon leaves a head over labels to AdamW."""
    heads = [name for name, _ in model.named_parameters() if name.endswith("score.weight")]
    return decay_groups(model.named_parameters(), weight_decay=weight_decay, no_decay=table_names(model), heads=heads)


def groups_of_kinds(groups: Sequence[ParameterGroup], kinds: Iterable[GroupKind]) -> list[ParameterGroup]:
    """One group of each kind, in this order, with the parameters of all `groups` of that kind, or with none."""
    found = []
    for kind in kinds:
        alike = [group for group in groups if group.kind == kind]
        weight_decay, matrix, part, learning_rate, max_grad_norm = kind
        found.append(
            ParameterGroup(
                names=tuple(name for group in alike for name in group.names),
                parameters=tuple(parameter for group in alike for parameter in group.parameters),
                weight_decay=weight_decay,
                matrix=matrix,
                part=part,
                learning_rate=learning_rate,
                max_grad_norm=max_grad_norm,
            )
        )
    return found
