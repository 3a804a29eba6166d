# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What hypothesis draws for test_random_operations: steps, with faults.

A step says "the n-th of what is possible then", and its draws are the same
whatever servers there are: hypothesis plays choices again, and two operations
at a time may end in either order.
"""

import dataclasses

from hypothesis import strategies as st

HOSTS = ('compute1', 'compute2')
CARDS = ('0000:5e:00.0', '0000:af:00.0')

#: operation -> (request, states of the server in which there is a use in it)
ACTIONS = {
    'stop': ({'os-stop': None}, 'ACTIVE'),
    'start': ({'os-start': None}, 'SHUTOFF'),
    'reboot soft': ({'reboot': {'type': 'SOFT'}}, 'ACTIVE'),
    'reboot hard': ({'reboot': {'type': 'HARD'}},
                    'ACTIVE SHUTOFF PAUSED SUSPENDED ERROR'),
    'pause': ({'pause': None}, 'ACTIVE'),
    'unpause': ({'unpause': None}, 'PAUSED'),
    'suspend': ({'suspend': None}, 'ACTIVE'),
    'resume': ({'resume': None}, 'SUSPENDED'),
    'rescue': ({'rescue': {'adminPass': 'secret'}}, 'ACTIVE SHUTOFF'),
    'unrescue': ({'unrescue': None}, 'RESCUE'),
    'rebuild': (None, 'ACTIVE SHUTOFF ERROR'),
    'resize': (None, 'ACTIVE SHUTOFF'),
    'migrate': ({'migrate': None}, 'ACTIVE SHUTOFF'),
    'live migrate': ({'os-migrateLive': {
        'host': None, 'block_migration': 'auto'}}, 'ACTIVE'),
    'confirm': ({'confirmResize': None}, 'VERIFY_RESIZE'),
    'revert': ({'revertResize': None}, 'VERIFY_RESIZE'),
    'shelve': ({'shelve': None}, 'ACTIVE SHUTOFF PAUSED SUSPENDED'),
    'unshelve': ({'unshelve': None}, 'SHELVED_OFFLOADED'),
    'delete': (None, 'ACTIVE SHUTOFF PAUSED SUSPENDED RESCUE VERIFY_RESIZE '
                     'SHELVED_OFFLOADED ERROR'),
}
#: states in which nothing is under way
AT_REST = {state for _, states in ACTIONS.values() for state in states.split()}
#: states in which there is a guest on the server's host
WITH_GUEST = AT_REST - {'SHELVED_OFFLOADED', 'ERROR'}
#: how often what no running server can do is chosen before what one can
RARE = 6
#: of which hypothesis draws one, and the step takes it modulo
MANY = 2 ** 16


@dataclasses.dataclass(frozen=True)
class Operation:
    """On a server, or the creation of one."""
    create: bool
    which: int
    #: flavor or image
    what: int


@dataclasses.dataclass(frozen=True)
class Fault:
    """What does not work as long as the operations of a step take."""
    kind: str
    #: how it fails, or what
    what: str
    #: (host, card), or None for all
    where: tuple | None = None
    #: how many times, or the how manieth; None for always
    number: int | None = None


@dataclasses.dataclass(frozen=True)
class OnServers:
    operations: list
    fault: Fault | None


@dataclasses.dataclass(frozen=True)
class OnHost:
    name: str
    host: str
    card: str
    #: bits for details
    what: int


ON_HOSTS = {'restart': 2, 'reconcile': 1, 'report': 1, 'scan': 1, 'break': 2,
            'mend': 2, 'forget bitstreams': 1, 'host is lost': 3,
            'power cut': 3}

which = st.integers(0, MANY - 1)
operations = st.builds(
    Operation, create=st.integers(0, 9).map(lambda n: n > 6), which=which,
    what=which)
one = st.lists(operations, min_size=1, max_size=1)
two = st.lists(operations, min_size=2, max_size=2)
one_or_two = st.one_of(one, st.one_of(one, two))
faults = {
    'programming': st.builds(
        Fault, st.just('programming'),
        st.sampled_from(('crc', 'operation', 'fifo')),
        st.sampled_from([None] * 4 + [(h, c) for h in HOSTS for c in CARDS]),
        st.sampled_from((1, 1, None))),
    'glance': st.builds(
        Fault, st.just('glance'), st.sampled_from(('503', 'truncate', 'flip')),
    ),
    'placement': st.builds(
        Fault, st.just('placement'), st.sampled_from((
            'get_allocations_for_consumer', 'get_provider_traits',
            'set_traits_for_provider',
            'get_allocations_for_resource_provider')),
        number=st.sampled_from((1, 1, 2, 3))),
    # a method of the driver that is slow, fails, or hangs until the operations
    # are told to have ended
    'driver': st.builds(
        Fault, st.just('driver'), st.sampled_from([
            f'{method} {how}' for method in (
                'program', 'program', 'reset_region', 'look', 'answers')
            for how in ('is slow', 'fails', 'hangs')]),
        number=st.sampled_from((1, 1, 2, None))),
    # from which change of a claim store on no file can be written
    'store': st.builds(
        Fault, st.just('store'), st.just('read-only'),
        number=st.sampled_from((1, 1, 2, 3, 4))),
    # a live migration, or a device of the guest that moves
    'libvirt': st.builds(
        Fault, st.just('libvirt'), st.sampled_from((
            'it fails', 'it is aborted', 'the guest keeps its devices',
            'devices do not go in'))),
    # nova-compute when it comes to, or from, a call for the first time
    'kill': st.builds(
        Fault, st.just('kill'), st.sampled_from((
            'before program_dfl_port', 'after program_dfl_port', 'after add',
            'before update', 'after update', 'before remove',
            'after remove'))),
}


@st.composite
def steps(draw):
    """OnServers or OnHost."""
    share = draw(st.integers(0, 99))
    if share >= 80:
        return OnHost(
            draw(st.sampled_from([
                n for n, weight in ON_HOSTS.items() for _ in range(weight)])),
            draw(st.sampled_from(HOSTS)), draw(st.sampled_from(CARDS)),
            draw(which))
    kind = draw(st.sampled_from(
        [None] * 10 + [*faults, 'kill', 'driver', 'libvirt']))
    amount = one if kind == 'kill' else one_or_two
    return OnServers(draw(amount), draw(faults[kind]) if kind else None)


def possible(servers):
    """(operation, server), the rarer ones more often than once."""
    return [
        (name, server) for server in servers
        for name, (_, states) in ACTIONS.items()
        if server['status'] in states.split()
        # one that never ran can only be deleted
        and (name == 'delete' or server['OS-SRV-USG:launched_at'])
        for _ in range(1 if 'ACTIVE' in states.split() else RARE)]
