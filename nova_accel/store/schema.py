# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The tables of the claim store, and how stores of earlier releases get them.

A store has a version (PRAGMA user_version). Each change of the tables makes a
new version, with one function that turns a store of the version before into
one of it.
"""

import contextlib
import json
import sqlite3

from nova_accel import model

_LOADED = """
CREATE TABLE loaded (
    device_address TEXT NOT NULL,
    region_index INTEGER NOT NULL,
    function_uuid TEXT,
    bitstream_id TEXT,
    function_name TEXT,
    content TEXT,{origin}
    PRIMARY KEY (device_address, region_index)
)"""

_RESERVED = """
CREATE TABLE IF NOT EXISTS reserved (
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    reserved INTEGER NOT NULL,
    PRIMARY KEY (provider_uuid, resource_class)
)"""

_POOLS = """
CREATE TABLE IF NOT EXISTS pools (
    provider_uuid TEXT PRIMARY KEY,
    operators INTEGER NOT NULL,
    least INTEGER NOT NULL,
    most INTEGER NOT NULL
)"""

_HANDOVERS = """
CREATE TABLE IF NOT EXISTS handovers (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    time TEXT NOT NULL,
    device TEXT NOT NULL,
    serial TEXT NOT NULL,
    handle TEXT NOT NULL,
    server TEXT NOT NULL,
    origin TEXT NOT NULL,
    method TEXT NOT NULL,
    before TEXT NOT NULL,
    after TEXT NOT NULL,
    result TEXT NOT NULL
)"""

_OF_DEVICE = (
    'CREATE INDEX IF NOT EXISTS handovers_of_device ON handovers (device)')

_UNSETTLED = """
CREATE TABLE IF NOT EXISTS unsettled (
    address TEXT NOT NULL,
    serial TEXT NOT NULL,{ids}
    PRIMARY KEY (address, serial{key})
)"""
_WITH_IDS = {'ids': "\n    ids TEXT NOT NULL DEFAULT '',", 'key': ', ids'}
_WITH_PARTS = {
    'ids': f"{_WITH_IDS['ids']}\n    but_for TEXT NOT NULL DEFAULT '',",
    'key': ', ids, but_for'}

_RECORDS = """
CREATE TABLE IF NOT EXISTS records (
    serial TEXT PRIMARY KEY,
    record TEXT NOT NULL
)"""

_ORIGINS = """
CREATE TABLE IF NOT EXISTS origins (
    serial TEXT NOT NULL,
    region_index INTEGER NOT NULL,
    origin TEXT,
    PRIMARY KEY (serial, region_index)
)"""

_WAITING = """
CREATE TABLE IF NOT EXISTS waiting (
    handle_type TEXT NOT NULL,
    handle_address TEXT NOT NULL,
    device_address TEXT NOT NULL,
    region_index INTEGER,
    shown INTEGER NOT NULL,{provider}
    PRIMARY KEY (handle_type, handle_address)
)"""
_PROVIDER = 'provider_uuid', "TEXT NOT NULL DEFAULT ''"

_DISABLED = """
CREATE TABLE IF NOT EXISTS disabled (
    address TEXT NOT NULL,
    serial TEXT NOT NULL,
    reason TEXT NOT NULL,
    since TEXT NOT NULL,
    PRIMARY KEY (address, serial)
)"""

_UNCLEAN = """
CREATE TABLE IF NOT EXISTS unclean (
    handle_address TEXT NOT NULL,
    device_address TEXT NOT NULL,
    serial TEXT NOT NULL,
    ids TEXT NOT NULL,
    policy TEXT NOT NULL,
    PRIMARY KEY (handle_address, device_address, serial)
)"""

_ORDERS = """
CREATE TABLE IF NOT EXISTS orders (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    verb TEXT NOT NULL,
    argument TEXT NOT NULL,
    since REAL NOT NULL,
    state TEXT NOT NULL,
    answer TEXT NOT NULL
)"""

#: the newest; a file without tables gets it
_SCHEMA = ("""
CREATE TABLE claims (
    uuid TEXT PRIMARY KEY,
    instance_uuid TEXT NOT NULL,
    role TEXT NOT NULL,
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    request_group TEXT NOT NULL,
    device_address TEXT NOT NULL,
    region_index INTEGER,
    handle_type TEXT NOT NULL,
    handle_address TEXT NOT NULL,
    handle TEXT NOT NULL,
    consumer_uuid TEXT NOT NULL,
    state TEXT NOT NULL,
    error TEXT NOT NULL,
    restore_function TEXT,
    restore_bitstream TEXT,
    created_type TEXT,
    prepared INTEGER NOT NULL,
    restore_origin TEXT,
    project_id TEXT,
    serial TEXT NOT NULL DEFAULT '',
    asked TEXT NOT NULL DEFAULT '',
    remembered TEXT NOT NULL DEFAULT '',
    ids TEXT NOT NULL DEFAULT '',
    operators_bitstream TEXT,
    since TEXT NOT NULL DEFAULT '',
    UNIQUE (handle_type, handle_address)
)""", """
CREATE TABLE devices (
    address TEXT PRIMARY KEY,
    device TEXT NOT NULL
)""", _LOADED.format(origin='\n    origin TEXT,'), _RESERVED, _HANDOVERS,
           _WAITING.format(provider=f'\n    {" ".join(_PROVIDER)},'),
           _UNSETTLED.format(**_WITH_PARTS), _RECORDS, _POOLS, _DISABLED,
           _ORDERS, _ORIGINS, _UNCLEAN, _OF_DEVICE)


def _columns(db: sqlite3.Connection, table: str) -> set[str]:
    return {row['name'] for row in db.execute(f'PRAGMA table_info({table})')}


def _add_column(db: sqlite3.Connection, table: str, name: str, kind: str,
                ) -> None:
    """A store that went back to release 0.1 has the column already."""
    if name not in _columns(db, table):
        db.execute(f'ALTER TABLE {table} ADD COLUMN {name} {kind}')


def _from_release_0_1(db: sqlite3.Connection) -> None:
    """Version 0, without a number: the store of release 0.1.

    Also of one that was version 1 already and was given back to release 0.1;
    docs/source/operators.rst says how. For 0.1, which reads claims by
    position, the order of the columns stays.
    """
    columns = _columns(db, 'claims')
    for old, new in (('function_uuid', 'restore_function'),
                     ('bitstream_id', 'restore_bitstream')):
        if old in columns:
            db.execute(f'ALTER TABLE claims RENAME COLUMN {old} TO {new}')
    # release 0.1 did not write this for handles that are made on demand, and
    # took back what was made in every state but this one
    db.execute("UPDATE claims SET prepared = 1 "
               "WHERE created_type IS NOT NULL AND state <> 'Initial'")
    db.execute('ALTER TABLE loaded RENAME TO loaded_0')
    db.execute(_LOADED.format(origin=''))
    names = ('device_address, region_index, function_uuid, bitstream_id, '
             'function_name, content')
    db.execute(f'INSERT INTO loaded ({names}) SELECT {names} FROM loaded_0')
    db.execute('DROP TABLE loaded_0')
    db.execute(_RESERVED)


def _from_version_1(db: sqlite3.Connection) -> None:
    """Version 1 does not say who loaded what: it is not known. Nor does it
    mark regions that a guest may have had, which are cleaned now.

    Also of a store that was version 2 and was given back to release 0.1.
    """
    db.execute("UPDATE claims SET prepared = 1 WHERE region_index IS NOT NULL "
               "AND state NOT IN ('Initial', 'Provisioning', 'BindFailed')")
    for table, name, kind in (
            ('loaded', 'origin', 'TEXT'), ('claims', 'restore_origin', 'TEXT'),
            ('claims', 'project_id', 'TEXT'),
            ('claims', 'serial', "TEXT NOT NULL DEFAULT ''")):
        _add_column(db, table, name, kind)
    for statement in (_HANDOVERS, _WAITING.format(provider=''),
                      _UNSETTLED.format(ids='', key=''), _RECORDS):
        db.execute(statement)


def _from_version_2(db: sqlite3.Connection) -> None:
    """Version 2 knows no pools, and each device has a provider of its own."""
    db.execute(_POOLS)
    _add_column(db, 'waiting', *_PROVIDER)


def _from_version_3(db: sqlite3.Connection) -> None:
    """Version 3 knows neither the operator's word about devices nor orders."""
    db.execute(_DISABLED)
    db.execute(_ORDERS)


def _from_version_4(db: sqlite3.Connection) -> None:
    """Version 4 keeps neither what a request has for the driver nor what a
    driver remembers, nor which product a server has, nor which card has what is
    not the operator's, nor whose image it was whose programming was broken off:
    it may have been a project's. The operator's image that a region is to carry
    again is known where it carries that now."""
    for name in ('asked', 'remembered', 'ids'):
        _add_column(db, 'claims', name, "TEXT NOT NULL DEFAULT ''")
    _add_column(db, 'claims', 'operators_bitstream', 'TEXT')
    db.execute('UPDATE claims SET operators_bitstream = restore_bitstream '
               'WHERE restore_origin IS NULL OR restore_origin = ?',
               (model.OPERATOR,))
    if 'ids' not in _columns(db, 'unsettled'):
        db.execute('ALTER TABLE unsettled RENAME TO unsettled_4')
        db.execute(_UNSETTLED.format(**_WITH_IDS))
        db.execute('INSERT INTO unsettled (address, serial) '
                   'SELECT address, serial FROM unsettled_4')
        db.execute('DROP TABLE unsettled_4')
    db.execute('UPDATE loaded SET origin = ? WHERE origin IS NULL '
               'AND function_uuid IS NULL', (model.SOME_PROJECT,))
    db.execute(_ORIGINS)
    for address, text in db.execute('SELECT address, device FROM devices'):
        # what is damaged is told by who reads it
        with contextlib.suppress(ValueError, AttributeError):
            serial = json.loads(text).get('serial')
            if serial:
                db.execute(
                    'INSERT OR REPLACE INTO origins SELECT ?, region_index, '
                    'origin FROM loaded WHERE device_address = ? AND origin '
                    'IS NOT ?', (serial, address, model.OPERATOR))


def _from_version_5(db: sqlite3.Connection) -> None:
    """Version 5 does not know which parts of a device were settled."""
    if 'but_for' in _columns(db, 'unsettled'):
        return
    db.execute('ALTER TABLE unsettled RENAME TO unsettled_5')
    db.execute(_UNSETTLED.format(**_WITH_PARTS))
    db.execute('INSERT INTO unsettled (address, serial, ids) '
               'SELECT address, serial, ids FROM unsettled_5')
    db.execute('DROP TABLE unsettled_5')


def _from_version_6(db: sqlite3.Connection) -> None:
    """Version 6 does not say since when a server has its devices."""
    _add_column(db, 'claims', 'since', "TEXT NOT NULL DEFAULT ''")


def _from_version_7(db: sqlite3.Connection) -> None:
    """Version 7 does not know what was released without cleaning."""
    db.execute(_UNCLEAN)
    db.execute(_OF_DEVICE)


#: number n makes version n + 1 of version n
MIGRATIONS = (_from_release_0_1, _from_version_1, _from_version_2,
              _from_version_3, _from_version_4, _from_version_5,
              _from_version_6, _from_version_7)
#: the newest, which this release reads and writes (PRAGMA user_version)
VERSION = len(MIGRATIONS)


def migrate(db: sqlite3.Connection, version: int) -> int:
    """Bring a store one version further, inside a transaction.

    :param version: of the store, at most VERSION.
    :returns: the version after it: VERSION for a store without tables, which
        gets those of the newest.
    """
    if is_new(db):
        for statement in _SCHEMA:
            db.execute(statement)
        version = VERSION
    elif version < VERSION:
        MIGRATIONS[version](db)
        version += 1
    db.execute(f'PRAGMA user_version = {version}')
    return version


def is_new(db: sqlite3.Connection) -> bool:
    """Whether the store has no tables yet."""
    return not db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' "
                          "AND name = 'claims'").fetchone()
