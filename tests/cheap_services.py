# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What makes any service of OpenStack cheap, once for the whole process.

* SQLite connections stay open. oslo.db opens one for each transaction. They are
  not tested each time, their transactions begin without SQLAlchemy's compiler,
  and no thread sleeps after one, which is for green threads.
* All databases share the statements that SQLAlchemy has compiled.
* A schema is proven to be one once. Placement and Glance do so with each
  request.
"""

import functools
import types

from jsonschema import validators
from oslo_db.sqlalchemy import engines
from sqlalchemy import event
from sqlalchemy import pool


class _OpenConnections(pool.QueuePool):
    """Connections to SQLite files that stay open."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{
            **kwargs, 'pool_size': 20, 'max_overflow': -1,
            'pre_ping': False})


def _begin(connection):
    """Before oslo.db's own, which then has nothing to do."""
    if 'in_transaction' not in connection.info:
        connection.connection.dbapi_connection.execute('BEGIN')
        connection.info['in_transaction'] = True


def _cheap(create, has_green_threads):
    """oslo.db's create_engine()."""
    @functools.wraps(create)
    def created(*args, **kwargs):
        engine = create(*args, **{
            **kwargs, 'thread_checkin': has_green_threads()})
        # oslo.db's own
        for listener in list(engine.dispatch.begin):
            event.remove(engine, 'begin', listener)
        event.listen(engine, 'begin', _begin)
        # a statement that is compiled is known by its dialect
        engine.dialect = first.setdefault(type(engine.dialect), engine.dialect)
        engine.update_execution_options(compiled_cache=compiled)
        return engine
    first, compiled = {}, {}
    return created


def _checked_once(check):
    """check_schema() of jsonschema's class of validators."""
    #: id of a schema -> the schema, which keeps the id its own
    good = {}

    @functools.wraps(check)
    def checked(schema, *args, **kwargs):
        if good.get(id(schema)) is not schema:
            check(schema, *args, **kwargs)
            good[id(schema)] = schema
    return checked


def databases(has_green_threads=lambda: False) -> None:
    """Make engines of oslo.db cheap, from now on.

    :param has_green_threads: whether those that share one are green.
    """
    engines.pool = types.SimpleNamespace(
        **{**vars(pool), 'NullPool': _OpenConnections})
    engines.create_engine = _cheap(engines.create_engine, has_green_threads)


@functools.cache
def schemas() -> None:
    """Prove each schema once."""
    kind = validators.validator_for({})
    kind.check_schema = _checked_once(kind.check_schema)
