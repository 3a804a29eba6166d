# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What becomes of claims, by tables."""

import dataclasses

import ddt
import testtools

from nova_accel.attach import judgement
from nova_accel import model

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
SERVER, OTHER, MOVE = 'server', 'other', 'move'
P1, P2 = 'provider 1', 'provider 2'
AT, ELSEWHERE = '0000:5e:00.0', '0000:af:00.0'
ABANDONED, NOT_ASKED, LOST, OUT, ARRIVED = judgement.Verdict
#: Nova's entry of the server: at rest, in an operation, of another flavor
REST, BUSY = judgement.Entry(), judgement.Entry(rests=False)
NONE_ASKED = judgement.Entry(asks=False)
NONE_ASKED_BUSY = judgement.Entry(rests=False, asks=False)


def claim(uuid='claim', consumer=SERVER, provider=P1, at=AT,
          state=model.ClaimState.BOUND):
    return model.Claim(
        uuid=uuid, instance_uuid=SERVER, consumer_uuid=consumer,
        provider_uuid=provider, resource_class=FPGA,
        group='1', device_address=at, region_index=0, state=state,
        handle=model.AttachHandle(model.HandleType.PCI, at))


def snapshot(allocated, guest, entry, claims, **more):
    """
    :param allocated: consumers of the first provider, or of several.
    :param guest: None; 'off' or 'runs', with its devices.
    :param entry: Nova's, None where the server is not here.
    """
    guests = {} if guest is None else {SERVER: frozenset(guest[1:])}
    if isinstance(allocated, list):
        allocated = {P1: allocated}
    consumers = more.pop('consumers', allocated)
    if consumers is not None:
        consumers = {
            uuid: {who: {FPGA: whose.count(who)} for who in whose}
            for uuid, whose in consumers.items()}
    return judgement.Snapshot(**{
        'before': claims, 'after': claims, 'consumers': consumers,
        'guests': guests,
        'running': guests if guest and guest[0] == 'runs' else {},
        'entries': {SERVER: entry} if entry else {}, **more})


MINE, OLD = claim(), claim('old', MOVE)
WITH, WITHOUT = ('runs', AT), ('runs',)
SECOND, TWO = claim('second', at=ELSEWHERE), ('runs', AT, ELSEWHERE)
OFF, OFF_WITHOUT = ('off', AT), ('off',)
#: who has it in Placement, guest, Nova's entry, claims -> verdicts
CASES = {
    # as it should be
    'allocated and in its guest': ([SERVER], WITH, REST, [MINE], []),
    'allocated and shut off': ([SERVER], OFF, REST, [MINE], []),
    'allocated and suspended': ([SERVER], OFF_WITHOUT, REST, [MINE], []),
    'allocated and being built': ([SERVER], None, None, [MINE], []),
    'of a move that waits': ([MOVE], OFF, REST, [OLD], []),
    'of a move, source of which is away': ([MOVE], None, None, [OLD], []),
    'of a move within the host': (
        [MOVE, SERVER], ('runs', ELSEWHERE), REST,
        [OLD, claim(at=ELSEWHERE)], []),
    # no allocation
    'nothing stands behind it': ([], None, None, [MINE], [ABANDONED]),
    'another server has its provider': (
        [OTHER], None, None, [MINE], [ABANDONED]),
    'Nova has it, without a guest': ([], None, REST, [MINE], [LOST]),
    'Nova has it, at work': ([], None, BUSY, [MINE], [LOST]),
    'its guest runs': ([], WITH, REST, [MINE], [LOST]),
    'its guest runs, unknown to Nova': ([], WITH, None, [MINE], [LOST]),
    'its guest is off, unknown to Nova': ([], OFF, None, [MINE], [LOST]),
    'neither allocation nor device': (
        [], WITHOUT, REST, [MINE], [LOST, OUT]),
    'a move that was confirmed': ([], OFF, REST, [OLD], [ABANDONED]),
    'a move whose server was deleted': ([], None, None, [OLD], [ABANDONED]),
    'a move that Nova may revert': (
        [], OFF, None, [OLD], [LOST], {'open_moves': {MOVE}}),
    'one that is not of another claim': (
        [], None, None, [OLD], [ABANDONED], {'open_moves': {OTHER}}),
    'a move within the host that Nova may revert': (
        [SERVER], ('runs', ELSEWHERE), REST,
        [OLD, claim(at=ELSEWHERE)], [LOST], {'open_moves': {MOVE}}),
    'an open move that keeps no server': (
        [], None, None, [MINE], [ABANDONED], {'open_moves': {SERVER}}),
    'a move, the device in the running guest': (
        [], WITH, REST, [OLD], [LOST]),
    'one of two devices of a pool': (
        [SERVER], TWO, REST, [MINE, SECOND], [LOST]),
    'two of two': ([SERVER, SERVER], TWO, REST, [MINE, SECOND], []),
    'two of two, in part as a move that begins': (
        [SERVER, MOVE], TWO, REST, [MINE, SECOND], [], {'moves': {
            MOVE: SERVER}}),
    'one of two, and Nova has it on another host': (
        [SERVER], None, None, [MINE, SECOND], [LOST]),
    'one of two, the other one being released': (
        [SERVER], WITH, REST, [MINE, dataclasses.replace(
            SECOND, state=model.ClaimState.DELETING)], []),
    # who counts
    'a move that is being reverted': ([SERVER], None, None, [OLD], []),
    'a confirmed move within the host': (
        [SERVER], ('runs', ELSEWHERE), REST,
        [OLD, claim(at=ELSEWHERE)], [ABANDONED]),
    'a move within a pool, reverted, the new device being cleaned': (
        [SERVER], None, None,
        [OLD, claim(at=ELSEWHERE, state=model.ClaimState.DELETING)], []),
    'a move within a pool, reverted, and that could not be written': (
        [SERVER], None, BUSY, [OLD, claim(at=ELSEWHERE)], []),
    'a move of two providers that is being reverted': (
        {P1: [SERVER], P2: [SERVER]}, None, None,
        [OLD, claim(provider=P2, at=ELSEWHERE)], []),
    # live migrations to this host
    'a server that comes': ([SERVER], None, None, [OLD], []),
    'a server that has come': ([SERVER], WITH, REST, [OLD], [ARRIVED]),
    'one that has come, without its device': (
        [SERVER], WITHOUT, REST, [OLD], [ARRIVED]),
    'one that comes just now': ([SERVER], WITH, BUSY, [OLD], []),
    'one that its move has still': ([SERVER, MOVE], WITH, REST, [OLD], []),
    'one that has something here': (
        [SERVER], ('runs', AT, ELSEWHERE), REST,
        [OLD, claim(provider=P2, at=ELSEWHERE)], [LOST]),
    'one that does not come': ([], None, None, [OLD], [ABANDONED]),
    # devices that are not in the guest
    'out of its guest': ([SERVER], WITHOUT, REST, [MINE], [OUT]),
    'out of it, while Nova is at work': (
        [SERVER], WITHOUT, BUSY, [MINE], []),
    'out of it, and Nova has it on another host': (
        [SERVER], WITHOUT, None, [MINE], []),
    # a flavor without accelerators
    'not asked for, and in no guest': (
        [SERVER], WITHOUT, NONE_ASKED, [MINE], [NOT_ASKED]),
    'not asked for, shut off': (
        [SERVER], OFF_WITHOUT, NONE_ASKED, [MINE], [NOT_ASKED]),
    'not asked for, nor allocated': (
        [], WITHOUT, NONE_ASKED, [MINE], [NOT_ASKED]),
    'not asked for, and in the guest still': (
        [SERVER], WITH, NONE_ASKED, [MINE], []),
    'not asked for, and Nova is at work': (
        [SERVER], WITHOUT, NONE_ASKED_BUSY, [MINE], []),
    'not asked for, without a guest': (
        [SERVER], None, NONE_ASKED, [MINE], []),
    'what the server had before it moved': (
        [MOVE], WITHOUT, NONE_ASKED, [OLD], []),
    # Placement does not answer
    'Placement is away': (None, None, None, [MINE], []),
    'Placement is away, and out of its guest': (
        None, WITHOUT, REST, [MINE], [OUT]),
    # a claim that ends
    'being released': ([], None, None, [claim(
        state=model.ClaimState.DELETING)], []),
}


@ddt.ddt
class JudgementTest(testtools.TestCase):

    @ddt.data(*CASES)
    def test_case(self, name):
        allocated, guest, entry, claims, verdicts, *more = CASES[name]
        self.assertEqual(verdicts, [
            verdict for _, verdict in judgement.judge(snapshot(
                allocated, guest, entry, claims, **dict(*more)))])

    @ddt.data(
        ('built meanwhile', {'before': []}),
        ('released meanwhile', {'after': [dataclasses.replace(
            MINE, state=model.ClaimState.DELETING)]}),
        ('ended meanwhile', {'after': []}),
        ('set aside meanwhile', {'after': [dataclasses.replace(
            MINE, consumer_uuid=MOVE)]}),
        ('being built', {'plugging': {SERVER}}),
        ('a move has begun', {'consumers': {P1: [MOVE]},
                              'moves': {MOVE: SERVER}}),
        ('moved to another provider', {
            'consumers': {P1: [], P2: [SERVER]},
            'shown_by': {'claim': P2}}))
    @ddt.unpack
    def test_meanwhile(self, name, more):
        """Nothing is said; without that there is a verdict."""
        for guest, entry in ((None, None), (WITH, REST)):
            self.assertTrue(judgement.judge(snapshot(
                [], guest, entry, [MINE])))
            self.assertEqual({}, judgement.judge(snapshot(
                [], guest, entry, [MINE], **more)), name)

    def test_move_of_another_claim(self):
        """The allocation of what a server had before a move does not stand
        behind what it has now."""
        known = snapshot({P1: [MOVE], P2: []}, WITH, REST,
                         [claim(at=AT), claim('old', MOVE, at=ELSEWHERE)],
                         moves={MOVE: SERVER})
        self.assertEqual([('claim', LOST)], list(judgement.judge(known)))

    @ddt.data(
        ([SERVER], WITH, set(), set()),
        ([SERVER], WITHOUT, set(), {SERVER}),
        ([], None, set(), {SERVER}),
        ([MOVE, OTHER], WITH, {MOVE, OTHER}, {SERVER}),
        (None, WITH, set(), set()))
    @ddt.unpack
    def test_who_is_asked(self, allocated, guest, moves, servers):
        known = snapshot(allocated, guest, None, [MINE])
        self.assertEqual(moves, known.moves_to_ask())
        self.assertEqual(servers, known.servers_to_ask())

    @ddt.data(
        ([], OFF, {MOVE}),
        ([MOVE], OFF, set()),
        # is being reverted
        ([SERVER], None, set()),
        # LOST, whatever Nova says
        ([], WITH, set()),
        (None, None, set()))
    @ddt.unpack
    def test_which_moves_are_asked_for(self, allocated, guest, moves):
        known = snapshot(allocated, guest, None, [MINE, OLD])
        self.assertEqual(moves, known.open_to_ask())

    @ddt.data(
        ([MINE], [MINE], {}),
        # deleted, or built, while libvirt was asked
        ([MINE], [], {}),
        ([], [MINE], {}),
        ([], [], {AT: SERVER}),
        ([claim(at=ELSEWHERE)], [], {AT: SERVER}))
    @ddt.unpack
    def test_strangers(self, before, after, strangers):
        self.assertEqual(strangers, snapshot(
            [], WITH, REST, [], before=before, after=after).strangers())
