# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Random orders of events on one compute host: tests.host.world.

nova-compute may be killed in the middle of each event. After it the next ones
are those that Nova, the operator or the owner have then.
"""

import collections
import contextlib
import dataclasses
import os
import random
import sqlite3
import uuid

from tests.host import killed
from tests.host import world
from tests.host.world import A, B, DISKS
from tests.unit import vgpus

#: servers at a time
MOST = 4


@dataclasses.dataclass(frozen=True)
class Event:
    name: str
    #: a number that chooses a server, a kind or a device
    which: int
    #: the point at which nova-compute is killed, as of tests.host.killed
    kill_at: int | None

    def __str__(self):
        return f'{self.name} {self.which}' + (
            '' if self.kill_at is None else f', killed at {self.kill_at}')


class Explored(world.World):
    """Plays events; a method that returns False could not play its event."""

    def play(self, event: Event) -> bool:
        """Play an event, where it is possible, and check what always holds.

        :raises world.Broken: it does not hold.
        """
        self.refused = ''
        if getattr(self, f'_{event.name}')(event) is False:
            return False
        self.counted[event.name] += 1
        self.check()
        return True

    def _one(self, event, *states):
        mine = [s for s in self.servers if s.state in states]
        return mine[event.which % len(mine)] if mine else None

    def _is_allocated(self, server):
        return server and server.uuid in self.cloud.read()['allocations']

    def _boot(self, event):
        kind = world.KINDS[event.which % len(world.KINDS)]
        allocation = self.place(kind, event.which // len(world.KINDS))
        if len(self.servers) >= MOST or not allocation:
            return False
        server = world.Server(str(uuid.uuid4()), kind, 'broken')
        self.servers.append(server)
        # nova-compute has nothing of it before it is killed at the beginning
        self.cloud.add_server(kind.specs, self._image(kind), server.uuid)
        self.cloud.allocate(server.uuid, allocation)
        if not self.do(['spawn', server.uuid], at=event.kill_at):
            server.state = 'active'
            if self.refused:
                self.end(server)
        return True

    def _image(self, kind):
        return {'accel:bitstream_id': self.own} if kind.own else {}

    def _delete(self, event):
        server = self._one(event, 'active', 'off', 'moved', 'away', 'broken',
                           'stuck', 'deleting', 'confirming', 'forgotten')
        return self.end(server, event.kill_at) if server else False

    def _forget(self, event):
        """It is deleted while nova-compute does not run."""
        server = self._one(event, 'active', 'off')
        if not server:
            return False
        self.compute.end()
        server.state = 'forgotten'
        self.cloud.delete_server(server.uuid)
        self.cloud.allocate(server.uuid, None)
        for serial in self.serials(server):
            del self.secrets[serial]
        return True

    def _stop(self, event):
        server = self._one(event, 'active')
        if not server:
            return False
        self.cloud.stop_guest(server.uuid)
        server.state = 'off'
        return True

    def _start(self, event):
        """Also of one that is in ERROR, whose state the operator resets."""
        server = self._one(event, 'off', 'active', 'broken')
        if not server:
            return False
        state, server.state = server.state, 'broken'
        if not self.do(['reboot', server.uuid], at=event.kill_at):
            server.state = 'active' if not self.refused else (
                'broken' if state == 'broken' else 'off')
        return True

    # Moves

    def _resize(self, event):
        """On the same host, with the same flavor."""
        server = self._one(event, 'active', 'off')
        if not self._is_allocated(server):
            return False
        allocation = self.place(server.kind, event.which)
        if not allocation:
            return False
        server.kept, server.state = self.serials(server), 'stuck'
        server.migration = str(uuid.uuid4())
        if not self.do(['resize_here', server.uuid, allocation,
                        server.migration], at=event.kill_at):
            server.state = 'moved'
            if self.refused:
                self.end(server)
        return True

    def _migrate(self, event):
        """To another host, as far as this one goes."""
        server = self._one(event, 'active', 'off')
        if not self._is_allocated(server):
            return False
        server.kept, server.state = self.serials(server), 'reverting'
        server.migration = str(uuid.uuid4())
        if not self.do(['migrate_away', server.uuid, server.migration],
                       at=event.kill_at):
            server.state = 'away'
        return True

    def _confirm(self, event):
        server = self._one(event, 'moved', 'away', 'confirming')
        if not server:
            return False
        if server.state != 'confirming':
            server.here = server.state == 'moved'
            server.state = 'confirming'
        for serial in server.kept:
            self.secrets.pop(serial, None)
        if self.do(['confirm', server.uuid, server.migration, server.here],
                   at=event.kill_at):
            return True
        if server.here:
            running = server.uuid in self.cloud.running()
            server.state = 'active' if running else 'off'
        else:
            self.gone(server)
        return True

    def _revert(self, event):
        server = self._one(event, 'moved', 'away', 'reverting')
        if not server:
            return False
        for serial in set(self.serials(server)) - set(server.kept):
            del self.secrets[serial]
        step = {'moved': 'revert_to_start', 'away': 'revert',
                'reverting': 'come_back'}[server.state]
        server.state = 'reverting'
        if not self.do([step, server.uuid] + [server.migration] * (
                step != 'come_back'), at=event.kill_at):
            server.state = 'active' if not self.refused else 'off'
        return True

    def _come(self, event):
        """A live migration to this host begins."""
        kind = world.KINDS[event.which % len(world.KINDS)]
        allocation = self.place(kind, event.which // len(world.KINDS))
        if len(self.servers) >= MOST or kind.own or not allocation:
            return False
        server = world.Server(
            str(uuid.uuid4()), kind, 'coming', str(uuid.uuid4()))
        self.servers.append(server)
        if self.do(['come', server.uuid, server.migration, kind.specs,
                    allocation], at=event.kill_at) or self.refused:
            self.roll_back(server)
        return True

    def _does_not_come(self, event):
        server = self._one(event, 'coming')
        return self.roll_back(server) if server else False

    def _arrive(self, event):
        server = self._one(event, 'coming')
        if not server:
            return False
        server.state = 'active'
        self.cloud.start_guest(server.uuid, [])
        was_killed = self.do(['arrive', server.uuid, server.migration],
                             at=event.kill_at)
        self.cloud.set_server(server.uuid, is_here=True)
        if was_killed:
            self.do(['reconcile'])
        return True

    def _leave(self, event):
        """A live migration to another host."""
        server = self._one(event, 'active')
        if not server:
            return False
        for serial in self.serials(server):
            del self.secrets[serial]
        server.state = 'deleting'
        self.cloud.set_server(server.uuid, is_here=False)
        if not self.do(['leave', server.uuid], ['delete', server.uuid],
                       at=event.kill_at):
            self.gone(server)
        return True

    # The host and its operator

    def _restart(self, event):
        self.compute.end()
        try:
            self.compute.start(event.kill_at)
        except killed.Killed:
            self.counted['kills'] += 1
        else:
            self.old_store = False

    def _reconcile(self, event):
        self.do(['reconcile'], ['settle'], at=event.kill_at)

    def _report(self, event):
        self.do(['report'], at=event.kill_at)

    def _power_cut(self, event):
        self.compute.end()
        self.cloud.lose_power()
        self.kernel.power_cycle()
        self.are_off()

    def _exchange(self, event):
        """Two disks change places while the host is off."""
        self._power_cut(event)
        self.kernel.exchange_cards(*DISKS)
        self.exchanged = not self.exchanged

    def _pull(self, event):
        """A disk is away after a power cut, or comes back."""
        self._power_cut(event)
        disk = DISKS[event.which % 2]
        cards = self.kernel._look()[1]['cards']
        away = not cards[disk]['faults'].get('vanish') or None
        self.kernel.set_fault(disk, vanish=away)

    def _exclude(self, event):
        """[accel] exclude_devices names a disk, or none; the next start has
        it."""
        self.compute.end()
        self.compute.options['exclude_devices'] = [
            f'address={DISKS[n]}' for n in (event.which % 3,) if n < 2]

    def _copy_store(self, event):
        copy = f'{self.directory}/copy'
        with contextlib.suppress(FileNotFoundError):
            os.unlink(copy)
        with contextlib.closing(sqlite3.connect(self.store)) as store:
            store.execute('VACUUM INTO ?', (copy,))

    def _put_back_store(self, event):
        copy = f'{self.directory}/copy'
        if not os.path.exists(copy):
            return False
        self.compute.end()
        for suffix in '', '-wal', '-shm':
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.store + suffix)
        os.rename(copy, self.store)
        self.old_store = True
        return True

    def _disable(self, event):
        device = (A, B, *DISKS, vgpus.GPU)[event.which % 5]
        self.do(['disable', device], at=event.kill_at)
        self.disabled = True

    def _enable(self, event):
        if not self.disabled:
            return False
        self.disabled = self.do(['enable'], at=event.kill_at)
        return True

    def _reserve(self, event):
        """The operator reserves one of a provider, or all that are free."""
        with self.cloud.state() as state:
            items = [item for _, provider in sorted(
                state['providers'].items())
                for item in provider['inventory'].values()]
            item = items[event.which % len(items)]
            item['reserved'] = item['total'] if event.which % 2 else 0

    def _lose_allocation(self, event):
        server = self._one(event, 'active', 'off')
        if not self._is_allocated(server):
            return False
        self.cloud.lose(server.uuid)
        return True

    def _program(self, event):
        """The operator programs a region that is disabled."""
        card, image = (A, B)[event.which % 2], [*self.images.values()][
            event.which // 2 % 2]
        self.do(['order_program', card, image], at=event.kill_at)

    def _clean(self, event):
        self.do(['clean', (A, B, *DISKS)[event.which % 4]], at=event.kill_at)

    def _ask(self, event):
        """The owner asks for another bitstream by metadata."""
        server = self._one(event, 'active')
        if not server or server.kind is not world.FPGA:
            return False
        self.do(['ask', server.uuid, [*self.images.values()][
            event.which % 2]], ['run_runtime'], at=event.kill_at)
        return True


#: event -> how often it is drawn; what is seldom possible comes more often
EVENTS = {
    'boot': 9, 'delete': 5, 'stop': 3, 'start': 4, 'resize': 6, 'migrate': 3,
    'confirm': 14, 'revert': 8, 'come': 3, 'does_not_come': 2, 'arrive': 10,
    'leave': 2, 'forget': 1, 'restart': 2, 'reconcile': 3, 'report': 2,
    'power_cut': 1, 'exchange': 1, 'pull': 1, 'exclude': 1, 'copy_store': 2,
    'put_back_store': 4, 'disable': 2, 'enable': 6, 'reserve': 1,
    'lose_allocation': 1, 'program': 1, 'clean': 1, 'ask': 3,
}


def order_of(seed: int, length: int) -> tuple[list[Event], str]:
    """Return the events of a seed, and [accel] pools."""
    draw = random.Random(seed)
    names = [name for name, often in EVENTS.items() for _ in range(often)]
    return [Event(draw.choice(names), draw.randrange(2 ** 16),
                  draw.choice((None, None, draw.randrange(20))))
            for _ in range(length)], draw.choice(('host', 'none'))


def explore(order: list[Event], pools: str) -> collections.Counter:
    """Play events in a new world, and end it.

    :returns: how often what happened.
    :raises world.Broken: with the events so far.
    """
    explored = Explored(pools)
    played: list[Event] = []
    try:
        for event in order:
            played.append(event)
            if not explored.play(event):
                played.pop()
        explored.finish()
    except Exception as error:
        raise world.Broken('\n'.join([
            f'{error}', f'with pools = {pools}, after:', *map(str, played)
            ])) from error
    finally:
        explored.close()
    return explored.counted


def shrink(order: list[Event], pools: str) -> world.Broken:
    """Leave out events as long as it fails; what it says at last."""
    failure = world.Broken('It does not fail when it is played again.')
    size = len(order)
    while size:
        begin = 0
        while begin < len(order):
            fewer = order[:begin] + order[begin + size:]
            try:
                explore(fewer, pools)
                begin += size
            except world.Broken as error:
                order, failure = fewer, error
        size //= 2
    return failure
