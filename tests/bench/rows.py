# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Hosts as rows of Placement's own database.

A cloud of ten thousand hosts takes hours to report itself by requests, and
seconds as rows.
"""

from collections.abc import Iterable, Mapping
import dataclasses

from placement import db_api
from placement.db.sqlalchemy import models
import sqlalchemy


@dataclasses.dataclass(frozen=True)
class Row:
    """A resource provider."""

    uuid: str
    name: str
    #: class -> total
    inventory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    traits: Iterable[str] = ()
    #: UUID of the provider that it is below, which comes before it
    parent: str | None = None


def write(rows: Iterable[Row]) -> None:
    """Write providers into the database of the Placement of this process,
    which has been started."""
    rows = list(rows)
    with db_api.get_placement_engine().begin() as connection:
        classes = _ids(connection, models.ResourceClass, {
            name for row in rows for name in row.inventory})
        traits = _ids(connection, models.Trait, {
            name for row in rows for name in row.traits})
        first = 1 + (connection.execute(sqlalchemy.select(
            sqlalchemy.func.max(models.ResourceProvider.id))).scalar() or 0)
        ids = {row.uuid: number for number, row in enumerate(rows, first)}
        roots: dict[str, int] = {}
        for row in rows:
            roots[row.uuid] = (roots[row.parent] if row.parent
                               else ids[row.uuid])
        _insert(connection, models.ResourceProvider, ({
            'id': ids[row.uuid], 'uuid': row.uuid, 'name': row.name,
            'generation': 0, 'root_provider_id': roots[row.uuid],
            'parent_provider_id': ids.get(row.parent)} for row in rows))
        _insert(connection, models.Inventory, ({
            'resource_provider_id': ids[row.uuid],
            'resource_class_id': classes[name], 'total': total, 'reserved': 0,
            'min_unit': 1, 'max_unit': total, 'step_size': 1,
            'allocation_ratio': 1.0}
            for row in rows for name, total in row.inventory.items()))
        _insert(connection, models.ResourceProviderTrait, ({
            'resource_provider_id': ids[row.uuid], 'trait_id': traits[name]}
            for row in rows for name in row.traits))


def _ids(connection, model, names):
    """Name -> id, of those that are there and those that are made."""
    def known():
        return dict(connection.execute(sqlalchemy.select(
            model.name, model.id)).all())
    _insert(connection, model, (
        {'name': name} for name in sorted(names - known().keys())))
    return known()


def _insert(connection, model, rows):
    rows = list(rows)
    if rows:
        connection.execute(sqlalchemy.insert(model), rows)
