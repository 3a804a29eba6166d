# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The rows of cards and of their durable holds, inside a transaction.

A card is identified by its serial number. If the number is unknown, or several
cards of the host have it, the card is identified by its product and its path
of ports (host.pci.ports), or by its product and address if the row or the
device at the address has no path. A row whose card is at its address is
``placed``. The cards of other rows are absent.

What the columns of a row contain depends on the kind of the hold:

=============  =================  ====================  =====================
kind           part               address               about
=============  =================  ====================  =====================
disabled       ''                 planned time, or ''   reason
defective      ''                 ''                    reason
planned        ''                 planned time          reason
owner-unknown  ''                 card's former address ''
returned       ''                 card's former address ''
unclean        address of the     card's former address policy of the
               handle                                   hand-over
=============  =================  ====================  =====================

A hold without a part is of the whole card. The *former address* is the address
of the card when a server had it. A card has at most one hold of each kind and
part, and not both owner-unknown and returned. For cards with one of these two
holds, the table ``settled`` has the parts that no longer contain data of a
server. inventory.holds describes the kinds.
"""

from collections.abc import Mapping
import sqlite3

from nova_accel import model
from nova_accel.store import values
from nova_accel import text

DISABLED, DEFECTIVE, PLANNED = 'disabled', 'defective', 'planned'
UNCLEAN = 'unclean'
OWNER_UNKNOWN, RETURNED = 'owner-unknown', 'returned'
#: groups of kinds; see _move_holds()
_GROUPS = ((DISABLED,), (DEFECTIVE,), (PLANNED,),
           (OWNER_UNKNOWN, RETURNED), (UNCLEAN,))
#: last part of a query on holds and cards
_JOIN = 'FROM holds JOIN cards ON card = number WHERE kind'


def card_at(db: sqlite3.Connection, address: str) -> int:
    """Return the row of the card at an address. Create a row if necessary."""
    found = db.execute('SELECT number FROM cards WHERE placed AND address = ?',
                       (address,)).fetchone()
    if found:
        return found[0]
    number = card(db, address, '')
    db.execute('UPDATE cards SET placed = 1 WHERE number = ?', (number,))
    return number


def card(db: sqlite3.Connection, address: str, serial: str,
         ids: str | None = None, ports: str = '') -> int:
    """Return the number of the row of a card. Add the row, as of an absent
    card, if it does not exist.

    :param address: the present or last address of the card.
    :param serial: '' if the number is unknown, or several cards have it.
    :param ids: Device.ids, '' for a row of only an address, or None for any
        card at the address.
    :param ports: Device.ports, or '' if they are unknown.
    """
    if serial:
        found = db.execute('SELECT number FROM cards WHERE serial = ?',
                           (serial,)).fetchone()
    elif ids is None:
        found = db.execute(
            "SELECT number FROM cards WHERE address = ? AND (placed OR "
            "serial = '' AND ids = '') ORDER BY placed DESC", (address,)
            ).fetchone()
    else:
        found = _without_serial(db, address, ids, ports)
    return found[0] if found else add(db, address, serial, ids or '', ports)


def _without_serial(db, address, ids, ports):
    """Find a row that has no serial number, and has the ids and ports of a
    card. Return its number, or None. If the row or the card has no ports,
    compare the addresses instead.
    """
    return db.execute(
        "SELECT number FROM cards WHERE serial = '' AND ids = :ids AND ("
        ":ports <> '' AND ports = :ports OR address = :address AND '' IN "
        '(:ports, ports)) ORDER BY ports = :ports DESC, placed DESC',
        {'ids': ids, 'ports': ports, 'address': address}).fetchone()


def arriving(db: sqlite3.Connection, address: str, serial: str,
             ids: str, ports: str) -> int:
    """Return the row of a card that arrives at an address.

    The row has the serial number of the card, or its product and its ports or
    address. If no row does, return the row that has only the address, and add
    this row if necessary.
    """
    if db.execute('SELECT 1 FROM cards WHERE serial = ?', (serial,)).fetchone(
            ) if serial else _without_serial(db, address, ids, ports):
        return card(db, address, serial, ids, ports)
    found = db.execute(
        "SELECT number FROM cards WHERE serial = '' AND ids = ? AND ports = ? "
        "AND ports <> ''", (ids, ports)).fetchone()
    if found:
        # its serial number was unknown, or several cards had it
        return found[0]
    number = card(db, address, '', '')
    db.execute('UPDATE cards SET serial = ? WHERE number = ?',
               (serial, number))
    return number


def own_serials(devices: Mapping[str, model.Device],
                notes: Mapping[str, values.Notes]) -> dict[str, str]:
    """Return address -> serial number, for numbers that only one device has.

    An absent device counts only if no present device has the same number.
    """
    found: dict[str, list[str]] = {}
    for address, device in devices.items():
        if device.serial:
            found.setdefault(device.serial, []).append(address)
    result = {}
    for serial, there in found.items():
        present = [address for address in there
                   if address not in notes or not notes[address].gone]
        if len(present or there) == 1:
            result[(present or there)[0]] = serial
    return result


def add(db: sqlite3.Connection, address: str, serial: str, ids: str,
        ports: str = '') -> int:
    """Add the row of an absent card."""
    return db.execute(
        'INSERT INTO cards (address, serial, ids, ports, placed) '
        'VALUES (?, ?, ?, ?, 0) RETURNING number',
        (address, serial, ids, ports)).fetchone()[0]


def put_away(db: sqlite3.Connection, address: str) -> None:
    """Write that the card at an address is absent now."""
    db.execute('UPDATE cards SET placed = 0, device = NULL '
               'WHERE placed AND address = ?', (address,))


def put(db: sqlite3.Connection, number: int, address: str) -> None:
    """Write that a card is at an address."""
    db.execute('UPDATE cards SET placed = 1, address = ? WHERE number = ?',
               (address, number))


def copy(db: sqlite3.Connection, number: int) -> int:
    """Add a copy of a card's row and of its holds, without the serial number
    and ports.

    :returns: the new row, of an absent card.
    """
    other = db.execute(
        "INSERT INTO cards (serial, ports, placed, address, ids, record) "
        "SELECT '', '', 0, address, ids, record FROM cards WHERE number = ? "
        'RETURNING number', (number,)).fetchone()[0]
    db.execute('INSERT INTO holds (card, kind, part, address, about, since) '
               'SELECT ?, kind, part, address, about, since FROM holds '
               'WHERE card = ?', (other, number))
    db.execute('INSERT INTO settled SELECT ?, part FROM settled '
               'WHERE card = ?', (other, number))
    return other


def take(db: sqlite3.Connection, number: int, serial: str) -> None:
    """Store the serial number that a card reports now. If an absent card has
    the number, it is the same card: its row is removed, and its holds move."""
    db.execute("UPDATE cards SET serial = '' WHERE serial = ? AND placed "
               'AND number <> ?', (serial, number))
    other = db.execute('DELETE FROM cards WHERE serial = ? AND number <> ? '
                       'RETURNING number', (serial, number)).fetchone()
    if other:
        db.execute('DELETE FROM regions WHERE card = ?', tuple(other))
        _move_holds(db, other[0], number)
    db.execute('UPDATE cards SET serial = ? WHERE number = ?',
               (serial, number))


def _move_holds(db, number, other):
    """Move the holds of one row to another row of the same card.

    If both rows have holds of the same group of kinds (_GROUPS), the holds of
    the old row are dropped, except unclean handles.

    :param number: the old row.
    :param other: the new row.
    """
    for kinds in _GROUPS:
        names = _quoted(kinds)
        if kinds == (UNCLEAN,) or not db.execute(
                f'SELECT 1 FROM holds WHERE card = ? AND kind IN ({names})',
                (other,)).fetchone():
            db.execute(f'UPDATE OR IGNORE holds SET card = ? WHERE card = ? '
                       f'AND kind IN ({names})', (other, number))
            if OWNER_UNKNOWN in kinds:
                db.execute('UPDATE OR IGNORE settled SET card = ? '
                           'WHERE card = ?', (other, number))
    # SQLite gives the number of the last row again
    for table in 'holds', 'settled':
        db.execute(f'DELETE FROM {table} WHERE card = ?', (number,))


def drop_unknown(db: sqlite3.Connection) -> None:
    """Remove the rows of absent cards that nothing identifies (neither a
    serial number nor ports), and that have neither holds nor content of a
    project."""
    db.execute(
        "DELETE FROM cards WHERE NOT placed AND serial = '' AND ports = '' "
        'AND NOT EXISTS '
        '(SELECT 1 FROM holds WHERE card = number) AND NOT EXISTS (SELECT 1 '
        'FROM regions WHERE card = number AND origin IS NOT ?)',
        (model.OPERATOR,))
    for table in 'regions', 'holds', 'settled':
        db.execute(f'DELETE FROM {table} WHERE card NOT IN '
                   f'(SELECT number FROM cards)')


# Holds


def _add(db, number, kind, part='', address='', about='', since=''):
    db.execute('INSERT OR REPLACE INTO holds (card, kind, part, address, '
               'about, since) VALUES (?, ?, ?, ?, ?, ?)',
               (number, kind, part, address, about, since or text.now()))


def _lift(db, kinds, which, **names):
    """Remove the holds of some kinds that meet a condition.

    :param which: the condition in SQL, on the columns of holds and cards.
    :param names: the values of the names in which.
    """
    db.execute(
        f'DELETE FROM holds WHERE rowid IN (SELECT holds.rowid {_JOIN} IN '
        f'({_quoted(kinds)}) AND {which})', names)
    db.execute(
        f'DELETE FROM settled WHERE card NOT IN (SELECT card FROM holds '
        f'WHERE kind IN ({_quoted((OWNER_UNKNOWN, RETURNED))}))')


def _quoted(kinds):
    return ', '.join(f"'{kind}'" for kind in kinds)


# Data of servers


def unsettled(db: sqlite3.Connection) -> frozenset[values.Unsettled]:
    """Return the cards that may contain data of a server."""
    settled: dict[int, set[str]] = {}
    for row in db.execute('SELECT card, part FROM settled'):
        settled.setdefault(row['card'], set()).add(row['part'])
    return frozenset(
        _unsettled(row, frozenset(settled.get(row['number'], ())))
        for row in db.execute(
            f'SELECT number, kind, cards.address, serial, ids, ports, placed, '
            f'holds.address AS had_at, since {_JOIN} IN '
            f'({_quoted((OWNER_UNKNOWN, RETURNED))})'))


def _unsettled(row, settled):
    since = row['since']
    if row['kind'] == OWNER_UNKNOWN:
        had_at = row['had_at']
        if had_at != row['address'] or not row['placed'] and (
                row['serial'] or row['ids']):
            return values.Unsettled(had_at, row['serial'], row['ids'],
                                    settled, True, since, row['ports'])
        return values.Unsettled(had_at, ids=row['ids'] if settled else '',
                                settled=settled, since=since)
    if row['serial'] and not row['placed']:
        return values.Unsettled(
            serial=row['serial'], settled=settled, since=since)
    # it may not report its serial number any more
    return values.Unsettled(row['address'], row['serial'], row['ids'], settled,
                            since=since, ports=row['ports'])


def settle(db: sqlite3.Connection, row: values.Unsettled) -> None:
    """Remove the hold of a card that may contain data of a server, because the
    card is clean, or because the server of the data has a claim."""
    if row.serial:
        which = 'serial = :serial'
    elif row.by_address and not row.moved:
        # not an absent card that was at the address before
        which = "cards.address = :address AND (placed OR serial || ids = '')"
    elif row.ports:
        which = "serial = '' AND ids = :ids AND ports = :ports"
    else:
        which = "cards.address = :address AND serial = '' AND ids = :ids"
    if row.by_address:
        which += ' AND holds.address = :address'
    _lift(db, (_kind(row),), which, address=row.address, serial=row.serial,
          ids=row.ids, ports=row.ports)


def unsettle(db: sqlite3.Connection, row: values.Unsettled) -> None:
    """Write that a card may contain data of a server without a claim."""
    number = card(db, row.address, row.serial,
                  None if row.by_address and not row.moved else row.ids,
                  row.ports)
    before = db.execute(
        f'SELECT kind FROM holds WHERE card = ? AND kind IN '
        f'({_quoted((OWNER_UNKNOWN, RETURNED))})', (number,)).fetchone()
    if before:
        db.executemany(
            'DELETE FROM settled WHERE card = ? AND part = ?',
            [(number, part)
             for part in _settled(db, number) - row.settled])
        if before['kind'] == OWNER_UNKNOWN:
            return
        db.execute('DELETE FROM holds WHERE card = ? AND kind = ?',
                   (number, RETURNED))
    else:
        db.executemany('INSERT INTO settled (card, part) VALUES (?, ?)',
                       [(number, part) for part in row.settled])
    _add(db, number, _kind(row), address=row.address)


def _settled(db, number):
    return {row['part'] for row in db.execute(
        'SELECT part FROM settled WHERE card = ?', (number,))}


def _kind(row):
    return OWNER_UNKNOWN if row.by_address else RETURNED


def unclean(db: sqlite3.Connection) -> frozenset[values.Unclean]:
    """Return the unclean handles."""
    return frozenset(
        values.Unclean(row['part'], row['address'], row['serial'], row['ids'],
                       row['about'], row['since'], row['ports'])
        for row in db.execute(
            f'SELECT part, holds.address, serial, ids, about, since, ports '
            f'{_JOIN} = ?', (UNCLEAN,)))


def set_unclean(db: sqlite3.Connection, row: values.Unclean) -> None:
    """Write that a handle is unclean."""
    _add(db, _card_of(db, row), UNCLEAN, row.handle_address,
         row.device_address, row.policy)


def set_clean(db: sqlite3.Connection, row: values.Unclean) -> None:
    """Write that a handle is clean."""
    db.execute('DELETE FROM holds WHERE card = ? AND kind = ? AND part = ?',
               (_card_of(db, row), UNCLEAN, row.handle_address))


def _card_of(db, row):
    return card(db, row.device_address, row.serial, row.ids, row.ports)


# Disabled devices


def disabled(db: sqlite3.Connection) -> dict[str, tuple[values.Disabled, ...]]:
    """Return the rows of disabled and planned devices, ordered by address.

    :returns: 'disabled' and 'planned' -> rows. A planned row whose time has
        come is in 'disabled'.
    """
    found = [(row.is_planned, row) for row in (
        values.Disabled(row['address'], row['serial'], row['about'],
                        row['since'], row['ids'], row['kind'] == DEFECTIVE,
                        row['ports'], row['at'], row['kind'] == DISABLED)
        for row in db.execute(
            f'SELECT cards.address, serial, about, since, ids, kind, ports, '
            f'holds.address AS at '
            f'{_JOIN} IN ({_quoted((DISABLED, DEFECTIVE, PLANNED))}) '
            f'ORDER BY cards.address, serial, kind DESC'))]
    return {'disabled': tuple(row for is_planned, row in found
                              if not is_planned),
            'planned': tuple(row for is_planned, row in found if is_planned)}


def disable(db: sqlite3.Connection, row: values.Disabled) -> None:
    """Write that a card is disabled, now or at a planned time. The card is
    identified by its serial number, or by its address if the row has no
    number."""
    _add(db, card(db, row.device_address, row.serial), _word(row),
         address=row.at, about=row.reason, since=row.since)


def enable(db: sqlite3.Connection, row: values.Disabled) -> None:
    """Write that a card is not disabled any more."""
    # a planned row may have begun since it was read
    _lift(db, (PLANNED, DISABLED) if row.at else (_word(row),),
          "serial = :serial AND (:serial <> '' OR cards.address = :address "
          "AND :ids IN ('', ids)) AND :at IN ('', holds.address)",
          serial=row.serial, address=row.device_address, ids=row.ids,
          at=row.at)


def begin_planned(db: sqlite3.Connection) -> None:
    """Mark the cards whose planned time has come as disabled."""
    db.execute('UPDATE OR REPLACE holds SET kind = ? WHERE kind = ? AND '
               'address <= ?', (DISABLED, PLANNED, text.now()))


def _word(row):
    return PLANNED if row.at else DEFECTIVE if row.of_health else DISABLED
