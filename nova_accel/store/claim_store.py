# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The persistent store of a compute host: claims, cards and holds.

nova-compute writes it. The operator's commands write tables of their own, which
nova-compute polls with refresh().
"""

from collections.abc import Iterable, Mapping
import contextlib
import errno
import os
import sqlite3
import stat
from urllib import parse

from nova_accel import exception
from nova_accel import model
from nova_accel.store import cards
from nova_accel.store import claims as claim_rows
from nova_accel.store import file as store_file
from nova_accel.store import journal
from nova_accel.store import rows
from nova_accel.store import schema
from nova_accel.store import values

MEMORY = store_file.MEMORY
_LEDGER = ('provider_uuid', 'resource_class', *values.Reserved._fields)


def file_name(host: str) -> str:
    """Return the name of the store of a compute host."""
    return f'accel_claims_{host}.sqlite'


class ClaimStore(claim_rows.Claims, cards.Cards, journal.Journal):
    """The claims, cards and holds of a host, in a SQLite file.

    Each method is one transaction, and any thread may call it. A method raises
    AcceleratorsUnavailable, with one sentence that names the file, if the disk
    is full or the file is locked, damaged or of a newer release. This class
    has the transactions on tables of several kinds.
    """

    def _read(self, db):
        with self._reading('in its table claims'):
            claims = claim_rows.read(db)
        return store_file.Memory(claims, orders=journal.read_orders(db),
                                 lineage=claim_rows.read_lineage(db),
                                 **self._facts_of_cards(db))

    def add(self, claims: Iterable[model.Claim]) -> None:
        """Write all of these claims or none.

        :raises ClaimConflict: a handle is held already.
        :raises DeviceUnavailable: a device is disabled, even if a command in
            another process has just disabled it.
        """
        claims = tuple(claims)
        with self._transaction() as db:
            # from the file: another process writes this table
            disabled = rows.disabled(db)['disabled']
            for claim in claims:
                if any(row.card.means(claim.card) for row in disabled):
                    raise exception.DeviceUnavailable(
                        f'Server {claim.instance_uuid} cannot get '
                        f'{claim.handle.address}, which the operator has '
                        f'disabled: the build is retried on another host.')
            self._begin_claims(db, claims)
            self._exchange_claims(db, (), claims)

    def settle(self, done: Iterable[values.Unsettled] = (),
               todo: Iterable[values.Unsettled] = (),
               claims: Iterable[model.Claim] = ()) -> None:
        """Store which devices may contain data of servers without claims, and
        write claims, in one transaction.

        :param done: rows to remove.
        :param todo: rows to add.
        :param claims: claims to write, all or none. If a handle waits for the
            operator, the new claim ends that.
        :raises ClaimConflict: one of the handles is held already.
        """
        done, todo, claims = set(done), set(todo), tuple(claims)
        with self._transaction() as db, self._facts(db):
            for row in done:
                rows.settle(db, row)
            for row in todo:
                rows.unsettle(db, row)
            handles = {claim.handle for claim in claims}
            self._exchange_claims(db, [
                c for c in self.all_claims()
                if c.waits and c.handle in handles], claims)

    def restore(self, claims: Iterable[model.Claim],
                gone: Iterable[model.Claim],
                todo: Iterable[values.Unsettled],
                seen: Iterable[tuple[str, int]]) -> None:
        """Write claims that guests carry and this store lacks, because the
        store is new or an older copy.

        :param claims: claims to write.
        :param gone: claims to remove, because they were replaced or ended.
        :param todo: rows of unsettled devices to add.
        :param seen: pairs (run, count) that the guests carry, and that the
            history of this store must contain (store.claims).
        """
        with self._transaction() as db, self._facts(db):
            for row in todo:
                rows.unsettle(db, row)
            for run, count in seen:
                self._learn(db, run, count)
            claims, gone = tuple(claims), tuple(gone)
            self._restore_uses(db, claims, gone)
            self._exchange_claims(db, gone, claims, are_restored=True)

    def exchange(self, old: Iterable[model.Claim],
                 new: Iterable[model.Claim]) -> None:
        """Replace old claims by new claims, all or none.

        :raises ClaimConflict: another claim has a handle of the new claims.
        """
        old, new = tuple(old), tuple(new)
        if old or new:
            with self._transaction() as db:
                self._exchange_claims(db, old, new)

    def reserved(self) -> dict[tuple[str, str], values.Reserved]:
        """Return the ledger of inventory.ledger, by provider uuid and resource
        class."""
        with self._transaction(write=False) as db:
            found = db.execute(
                f'SELECT {", ".join(_LEDGER)} FROM ledger').fetchall()
        with self._reading('in its table ledger'):
            return {tuple(row)[:2]: values.Reserved(*tuple(row)[2:])
                    for row in found}

    def set_reserved(
            self, rows: Mapping[tuple[str, str], values.Reserved | None],
            returned: Iterable[model.Claim] = ()) -> None:
        """Write rows of the ledger, all or none.

        :param rows: (provider uuid, resource class) -> row, or None to remove
            the row.
        :param returned: claims of handles that the operator has released.
        """
        with self._transaction() as db:
            for key, row in rows.items():
                db.execute('DELETE FROM ledger WHERE provider_uuid = ? '
                           'AND resource_class = ?', key)
                if row:
                    db.execute(
                        f'INSERT INTO ledger ({", ".join(_LEDGER)}) '
                        f'VALUES (?, ?, ?, ?, ?)', (*key, *row))
            self._exchange_claims(db, returned, ())

    def refresh(self) -> bool:
        """Read the rows that commands have written since the last call, and
        notice planned times that have come.

        If nothing has changed, this takes some microseconds: it only reads
        memory that SQLite shares between processes (PRAGMA data_version).

        :returns: whether a row has changed.
        :raises AcceleratorsUnavailable: the file was removed or replaced.
        """
        with self._transaction(write=False) as db:
            self._check_in_place()
            version = db.execute('PRAGMA data_version').fetchone()[0]
            if version == self._data_version and all(
                    row.is_planned for row in self._known.planned):
                return False
            found = {**rows.disabled(db), 'orders': journal.read_orders(db)}
            self._data_version = version
            if all(getattr(self._known, name) == now
                   for name, now in found.items()):
                return False
            self._change(**found)
        return True


def copy_of(path: str) -> ClaimStore:
    """Return a copy in memory of a file.

    The copy has the version of this release. The file stays unchanged, and may
    be open in another process.

    :raises NoClaimStore: the file does not exist.
    :raises AcceleratorsUnavailable: the file cannot be read, or is of a later
        release.
    """
    _check_exists(path)
    try:
        with contextlib.closing(sqlite3.connect(
                f'file:{parse.quote(path)}?mode=ro', uri=True)) as file:
            return ClaimStore(MEMORY, file, name=path)
    except (sqlite3.Error, OSError) as error:
        raise _refused(path, 'read', error) from error


def existing(path: str) -> ClaimStore:
    """Return the store of a host for a command that writes, possibly while
    nova-compute runs.

    Only nova-compute creates or upgrades a store.

    :raises NoClaimStore: the file does not exist.
    :raises AcceleratorsUnavailable: the file cannot be written, or is of
        another release.
    """
    _check_exists(path)
    try:
        with contextlib.closing(sqlite3.connect(
                f'file:{parse.quote(path)}?mode=rw', uri=True)) as file:
            version = store_file.check_version(file, path)
    except (sqlite3.Error, OSError) as error:
        raise _refused(path, 'written', error) from error
    # SQLite reports it only at the first write
    if not os.access(path, os.W_OK, effective_ids=True):
        raise _refused(path, 'written', os.strerror(errno.EACCES))
    if version < schema.VERSION:
        raise exception.AcceleratorsUnavailable(
            f'The claim store {path} has version {version}, and this release '
            f'of nova_accel writes version {schema.VERSION}: start '
            f'nova-compute of the same release as this command first.')
    return ClaimStore(path)


def _check_exists(path):
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise exception.NoClaimStore(
            f'The claim store {path} does not exist: nova-compute creates it '
            f'at its first start; else name the file of this host by --store.'
            ) from None
    except OSError:
        # the caller that opens it reports the reason
        return
    # SQLite waits for the other end of a pipe
    if not stat.S_ISREG(found.st_mode):
        raise exception.AcceleratorsUnavailable(
            f'The claim store {path} is not a file: name the file of this host '
            f'by --store.')


def _refused(path, what, error):
    code = getattr(error, 'sqlite_errorcode', -1) & 0xff
    advice = store_file.ADVICE.get(
        code, 'run the command as the user of nova-compute')
    return exception.AcceleratorsUnavailable(
        f'The claim store {path} cannot be {what} ({error}): {advice}.')
