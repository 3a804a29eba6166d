# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find and change the rows of the table cards, inside a transaction.

A card is identified by its serial number. If the number is unknown, or several
cards of the host have it, the card is identified by its product and its path
of ports (host.pci.ports), or by its product and address if the row or the
device at the address has no path. A row whose card is at its address is
``placed``. The cards of other rows are absent.
"""

from collections.abc import Mapping
import sqlite3

from nova_accel import model
from nova_accel.store import values


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
    """Add a copy of a card's row, without the serial number and ports.

    :returns: the new row, of an absent card.
    """
    return db.execute(
        "INSERT INTO cards (serial, ports, placed, address, ids, record) "
        "SELECT '', '', 0, address, ids, record FROM cards WHERE number = ? "
        'RETURNING number', (number,)).fetchone()[0]


def take(db: sqlite3.Connection, number: int, serial: str) -> int | None:
    """Store the serial number that a card reports now. If an absent card has
    the number, it is the same card, and the row of the absent card is removed.

    :returns: the removed row, or None.
    """
    db.execute("UPDATE cards SET serial = '' WHERE serial = ? AND placed "
               'AND number <> ?', (serial, number))
    other = db.execute('DELETE FROM cards WHERE serial = ? AND number <> ? '
                       'RETURNING number', (serial, number)).fetchone()
    if other:
        db.execute('DELETE FROM regions WHERE card = ?', tuple(other))
    db.execute('UPDATE cards SET serial = ? WHERE number = ?',
               (serial, number))
    return other[0] if other else None


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
