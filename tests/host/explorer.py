# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Random orders of events on one compute host: tests.host.world.

The next event is drawn from those that Nova, the operator or the owner can
cause at that moment. nova-compute may be killed in the middle of each event.
"""

import collections
from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import os
import random
import sqlite3
import uuid

from tests.host import killed
from tests.host import world
from tests.host.world import A, B, DISKS, EXCHANGED
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

    def __init__(self, setting: 'Setting'):
        super().__init__(setting.pools)
        self.kinds = [world.KINDS[n] for n in setting.kinds]
        self.copy = f'{self.directory}/copy'
        #: whether that may have devices that are disabled
        self.disabled_in_copy = False

    def play(self, event: Event) -> bool:
        """Play an event, where it is possible, and check what always holds.

        :raises world.Broken: it does not hold.
        """
        self.refused = ''
        if event.which % 4 == 0:
            self._copy_store()
        if getattr(self, f'_{event.name}')(event) is False:
            return False
        if event.name in SURPRISES and event.which % 8 < 4:
            # before nova-compute compares anything
            self._boot(dataclasses.replace(event, kill_at=None))
        self.counted[event.name] += 1
        self.check()
        return True

    def _one(self, event, *states):
        mine = [s for s in self.servers if s.state in states]
        return mine[event.which % len(mine)] if mine else None

    def _is_allocated(self, server):
        return server and server.uuid in self.cloud.read()['allocations']

    def _boot(self, event):
        kind = self.kinds[event.which % len(self.kinds)]
        allocation = self.place(kind, event.which // len(self.kinds))
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
        kind = self.kinds[event.which % len(self.kinds)]
        allocation = self.place(kind, event.which // len(self.kinds))
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

    def _rest(self, event):
        """Nothing happens for some minutes."""
        self.rest()

    def _rebuild(self, event):
        server = self._one(event, 'active', 'off')
        if not self._is_allocated(server):
            return False
        server.state = 'broken'
        if not self.do(['rebuild', server.uuid, self._image(server.kind)],
                       at=event.kill_at):
            server.state = 'broken' if self.refused else 'active'
        return True

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
        """Two cards change places while the host is off."""
        self._power_cut(event)
        pair = EXCHANGED[event.which % 3 == 0]
        self.kernel.exchange_cards(*pair)
        self.exchanged ^= {pair}

    def _pull(self, event):
        """A card is away after a power cut, or comes back; another disk may
        be in its slot."""
        if event.which % 2:
            self._exchange(event)
        else:
            self._power_cut(event)
        card = (*DISKS, A)[event.which % 3]
        self.kernel.set_fault(
            card, vanish=None if card in self.away() else True)

    def _exclude(self, event):
        """[accel] exclude_devices names a disk, or none; the next start has
        it."""
        self.compute.end()
        self.compute.options['exclude_devices'] = [
            f'address={DISKS[event.which % 2]}'] * (
                not self.compute.options.get('exclude_devices'))

    def _copy_store(self):
        if not os.path.exists(self.store):
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.copy)
        with contextlib.closing(sqlite3.connect(self.store)) as store:
            store.execute('VACUUM INTO ?', (self.copy,))
        self.disabled_in_copy = self.disabled

    def _replace_store(self, event):
        """An older copy is put back, or none, while nova-compute is stopped.
        """
        is_copied = event.which % 3 and os.path.exists(self.copy)
        # the operator has to accept a disk that a new store finds where it
        # had another one; and a server that comes has no guest that says so
        if not is_copied and (self.away() or self.exchanged) or any(
                server.state == 'coming' for server in self.servers):
            return False
        self.compute.end()
        for suffix in '', '-wal', '-shm':
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.store + suffix)
        self.old_store = True
        # which the copy may not have
        self.refused_devices = set()
        if is_copied:
            os.rename(self.copy, self.store)
            self.disabled = self.disabled_in_copy
        else:
            self.compute.options['exclude_devices'] = []
            self.lost_store = True
            self.do(['scan'])
        return True

    def _disable(self, event):
        device = (A, B, *DISKS, vgpus.GPU)[event.which % 5]
        if not self.do(['disable', device], at=event.kill_at):
            self.refused_devices.add(device)
        self.disabled = True

    def _enable(self, event):
        if not self.disabled:
            return False
        self.refused_devices = set()
        self.disabled = self.do(['enable'], at=event.kill_at)
        return True

    def _reserve(self, event):
        """The operator reserves one of a provider, or all that are free."""
        self.reserved = True
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


#: event -> how often it is drawn
EVENTS = {
    'boot': 12, 'delete': 5, 'stop': 4, 'start': 5, 'rebuild': 2, 'resize': 6,
    'migrate': 4, 'confirm': 12, 'revert': 9, 'come': 8, 'does_not_come': 2,
    'arrive': 10, 'leave': 2, 'forget': 2, 'restart': 3, 'reconcile': 3,
    'rest': 5, 'report': 2, 'power_cut': 1, 'exchange': 2, 'pull': 2,
    'exclude': 2, 'replace_store': 3, 'disable': 2,
    'enable': 3, 'reserve': 1, 'lose_allocation': 3, 'program': 1, 'clean': 1,
    'ask': 2,
}
#: after which nova-compute knows less than it did
SURPRISES = 'exchange', 'pull', 'replace_store', 'exclude'
#: the kinds that each order has
ALWAYS = ('boot', 'delete', 'start', 'rest', 'restart', 'confirm', 'revert',
          'arrive')


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is the same in all of an order."""

    #: [accel] pools
    pools: str
    #: indices of world.KINDS
    kinds: tuple[int, ...]


def events_of(seed: int) -> tuple[Iterator[Event], Setting]:
    """Return the events of a seed, without end, and their setting.

    Most kinds of events and of servers are left out or seldom, others for each
    seed: few kinds meet more often, and one that puts an end to what others
    bring about would do so in each order.
    """
    draw = random.Random(seed)
    setting = Setting(draw.choice(('host', 'none')), tuple(sorted({
        # only disks keep data without power
        draw.choice((0, 0, 0, 1, 2, 3, 4, 5)) for _ in range(2)})))
    names = [name for name in EVENTS
             if name in ALWAYS or draw.random() < 0.5]
    themes = draw.sample(names, 3)
    often = [EVENTS[name] * (4 if name in themes else 1) for name in names]

    def events():
        while True:
            name, = draw.choices(names, often)
            yield Event(name, draw.randrange(2 ** 16),
                        int(draw.expovariate(0.2)) if draw.random() < 0.3
                        else None)
    return events(), setting


def explore(events: Iterable[Event], setting: Setting, length: int,
            ) -> collections.Counter:
    """Play those events in a new world that are possible, and end it.

    :param length: the most events.
    :returns: how often what happened.
    :raises Failed: with the events so far.
    """
    explored, played = Explored(setting), []
    try:
        for event in events:
            played.append(event)
            if not explored.play(event):
                played.pop()
            elif len(played) == length:
                break
        explored.finish()
    except Exception as error:
        raise Failed(error, played, setting) from error
    finally:
        explored.close()
    return explored.counted


class Failed(AssertionError):

    def __init__(self, error: Exception, played: list[Event],
                 setting: Setting):
        super().__init__('\n'.join([
            f'{error}', f'with {setting}, after:', *map(str, played)]))
        self.played, self.setting = played, setting


def shrink(failure: Failed) -> Failed:
    """Leave out events as long as it fails; what it says at last."""
    size = len(failure.played)
    while size:
        begin = 0
        while begin < len(failure.played):
            fewer = failure.played[:begin] + failure.played[begin + size:]
            try:
                explore(fewer, failure.setting, len(fewer))
                begin += size
            except Failed as error:
                failure = error
        size //= 2
    return failure
