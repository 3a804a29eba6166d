# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The question for allocation candidates, as Nova's scheduler asks Placement.
"""

from collections.abc import Iterable, Mapping
from urllib import parse

from nova_accel import request


def url(groups: Mapping[str, request.Group], limit: int, *,
        policy: str | None = None, root_forbidden: Iterable[str] = (),
        in_tree: str | None = None) -> str:
    """Return the path and query of GET /allocation_candidates, 1.35 or later.

    :param groups: by suffix, as request.groups() returns them.
    :param limit: of candidates.
    :param policy: group_policy, which Placement demands for two and more
        groups with a suffix; 'none' by default.
    :param root_forbidden: traits that no host may have.
    :param in_tree: UUID of the only host that is asked for.
    """
    query = []
    granular = [suffix for suffix, group in groups.items()
                if suffix and any(group.resources.values())]
    for suffix, group in groups.items():
        resources = ','.join(
            f'{name}:{amount}'
            for name, amount in sorted(group.resources.items()) if amount)
        traits = [*sorted(group.required),
                  *(f'!{trait}' for trait in sorted(group.forbidden))]
        if resources:
            query.append((f'resources{suffix}', resources))
        if traits:
            query.append((f'required{suffix}', ','.join(traits)))
    if len(granular) > 1:
        query.append(('group_policy', policy or 'none'))
    if root_forbidden:
        query.append(('root_required', ','.join(
            f'!{trait}' for trait in root_forbidden)))
    if in_tree:
        query += [(f'in_tree{suffix}', in_tree)
                  for suffix, group in groups.items()
                  if any(group.resources.values())]
    query.append(('limit', str(limit)))
    return f'/allocation_candidates?{parse.urlencode(query, safe=":,!")}'
