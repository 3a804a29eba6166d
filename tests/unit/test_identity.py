# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The table of nova_accel.inventory.identity, and addresses of moved cards."""

import dataclasses

import ddt
import testtools

from nova_accel.host import pci
from nova_accel.inventory import identity
from nova_accel import model
from nova_accel.store import values
from tests.unit.host import A, B
from tests.unit.identities import claim, device

C = '0000:c1:00.0'
HERE, MOVED, EXCHANGED = identity.Where


def misplaced(devices, claims):
    return identity.misplaced(claims, identity.places(claims, devices))


@ddt.ddt
class WhereaboutsTest(testtools.TestCase):

    @ddt.unpack
    @ddt.data(
        # serial of the claim, {address: serial now}, where, address
        ('a', {A: 'a'}, HERE, A),
        ('a', {A: 'a', B: 'a'}, HERE, A),
        ('', {A: 'b'}, HERE, A),
        ('', {A: 'b', B: 'a'}, HERE, A),
        ('a', {A: ''}, HERE, A),
        ('a', {}, HERE, None),
        ('a', {B: 'b'}, HERE, None),
        ('a', {B: 'a'}, MOVED, B),
        ('a', {A: 'b', B: 'a'}, MOVED, B),
        ('a', {A: '', B: 'a'}, MOVED, B),
        ('a', {A: 'b'}, EXCHANGED, A),
        ('a', {A: 'b', B: 'c'}, EXCHANGED, A),
        # which of the two it is cannot be known
        ('a', {A: 'b', B: 'a', C: 'a'}, EXCHANGED, A),
        ('a', {B: 'a', C: 'a'}, HERE, None))
    def test_table(self, serial, there, where, address):
        found = identity.whereabouts(
            claim(serial), {a: device(a, s) for a, s in there.items()})
        self.assertEqual((where, address), (
            found[0], found[1] and found[1].address))

    @ddt.unpack
    @ddt.data(
        # ports of the claim, {address: ports now}, where, address
        ('p', {A: 'p'}, HERE, A),
        ('p', {A: 'p', B: 'q'}, HERE, A),
        ('p', {A: 'q', B: 'p'}, MOVED, B),
        ('p', {A: '', B: 'p'}, MOVED, B),
        ('p', {B: 'p'}, MOVED, B),
        ('p', {A: 'q', B: 'r'}, EXCHANGED, A),
        # nothing else can be compared
        ('p', {A: ''}, HERE, A),
        ('', {A: 'q', B: 'p'}, HERE, A),
        ('p', {B: 'q'}, HERE, None),
        # no ports are those of two devices
        ('p', {A: 'q', B: 'p', C: 'p'}, EXCHANGED, A))
    def test_ports(self, ports, there, where, address):
        for serials in ('', ''), ('a', ''), ('', 'a'):
            mine = dataclasses.replace(
                claim(serials[0], ids='1234:5678'), ports=ports)
            found = identity.whereabouts(mine, {
                a: device(a, serials[1], ports=p) for a, p in there.items()})
            self.assertEqual((where, address), (
                found[0], found[1] and found[1].address))

    @ddt.unpack
    @ddt.data(
        # the serial number says more
        ('a', '1234:5678', {A: ('b', 'p')}, EXCHANGED, A),
        ('a', '1234:5678', {A: ('a', 'q'), B: ('b', 'p')}, HERE, A),
        ('a', '1234:5678', {A: ('b', 'p'), B: ('a', 'q')}, MOVED, B),
        # of several with it, the ports tell the one
        ('a', '1234:5678', {B: ('a', 'p'), C: ('a', 'q')}, MOVED, B),
        # another product in the same slot
        ('', '1234:9999', {A: ('', 'p')}, EXCHANGED, A),
        ('', '1234:9999', {B: ('', 'p')}, HERE, None))
    def test_ports_beside(self, serial, ids, there, where, address):
        mine = dataclasses.replace(claim(serial, ids=ids), ports='p')
        found = identity.whereabouts(mine, {
            a: device(a, s, ports=p) for a, (s, p) in there.items()})
        self.assertEqual((where, address), (
            found[0], found[1] and found[1].address))

    @ddt.unpack
    @ddt.data(
        # serial and ids of the claim, the same of what is there, where
        ('', '', '', '10de:2330', HERE),
        ('', '10de:2330', '', '10de:2330', HERE),
        ('', '10de:2330', '', '10de:2331', EXCHANGED),
        ('', '10de:2330', 'b', '1002:2330', EXCHANGED),
        ('a', '10de:2330', '', '1002:74a1', EXCHANGED),
        ('a', '10de:2330', '', '10de:2330', HERE),
        # the serial number says more
        ('a', '10de:2330', 'a', '1002:74a1', HERE),
        # the subsystem is compared where both are known
        ('', '10de:2330 10de:1', '', '10de:2330', HERE),
        ('', '10de:2330', '', '10de:2330 10de:1', HERE),
        ('', '10de:2330 10de:1', '', '10de:2330 10de:1', HERE),
        ('', '10de:2330 10de:1', '', '10de:2330 10de:2', EXCHANGED))
    def test_products(self, serial, ids, serial_now, ids_now, where):
        mine = claim(serial, ids=ids)
        now = device(A, serial_now, ids_now)
        self.assertEqual((where, now),
                         identity.whereabouts(mine, {A: now}))
        found = identity.trouble(
            mine, *identity.whereabouts(mine, {A: now}))
        self.assertEqual(where is EXCHANGED, bool(found))
        self.assertEqual({A} if found else set(),
                         set(misplaced({A: now}, [mine])))
        if found:
            self.assertIn(f'product {ids_now} in place of {ids}', found)
        self.assertEqual((HERE, now),
                         identity.whereabouts(mine, {A: now}, {A}))

    @ddt.unpack
    @ddt.data(('', '', '10de:1', False), ('', '', '10de:2', True),
              ('a', '', '10de:1', False), ('a', '', '10de:2', True),
              ('a', 'b', '10de:1', True), ('a', 'a', '10de:2', False))
    def test_other_card(self, before, now, ids, is_other):
        self.assertEqual(is_other, identity.is_other_card(
            device(A, before, '10de:1'), device(A, now, ids)))

    def test_gone(self):
        """What is gone is not there, whatever is known of it."""
        gone = device(A, 'a')
        self.assertEqual((HERE, gone), identity.whereabouts(
            claim('a'), {A: gone}, {A}))
        moved = device(B, 'a')
        self.assertEqual((MOVED, moved), identity.whereabouts(
            claim('a'), {A: gone, B: moved}, {A}))
        self.assertEqual(HERE, identity.whereabouts(
            claim('a'), {A: device(A, ''), B: moved}, {B})[0])

    def test_serial_for_claim(self):
        same = {A: device(A, 'a'), B: device(B, 'a')}
        self.assertEqual('a', identity.serial_for_claim(
            A, {A: device(A, 'a'), B: device(B, 'b')}, ()))
        self.assertEqual('', identity.serial_for_claim(A, same, ()))
        self.assertEqual('a', identity.serial_for_claim(A, same, {B}))

    def test_misplaced(self):
        devices = {A: device(A, 'b'), B: device(B, 'a'), C: device(C, 'c')}
        found = misplaced(
            devices, [claim('a'), claim('c', C), claim('', B)])
        self.assertEqual({A, B}, set(found))
        self.assertIn(f'had it at {A}', found[B])

    @ddt.unpack
    @ddt.data(('0000:5e:00.0', '0000:81:00.0', '0000:81:00.0'),
              ('0000:5e:00.3', '0000:81:00.0', '0000:81:00.3'),
              ('0000:5e:02.1', '0000:81:00.0', '0000:81:02.1'),
              # a VF on the next bus
              ('0000:5f:00.1', '0001:81:01.0', '0001:82:01.1'))
    def test_address_of_a_moved_handle(self, before, now, expected):
        self.assertEqual(expected, pci.moved(before, '0000:5e:00.0', now))


@ddt.ddt
class DisabledTest(testtools.TestCase):

    @ddt.unpack
    @ddt.data(
        # serial of the word about A, {address: serial now}, disabled
        ('', {A: ''}, [A]),
        ('', {A: 'b', B: 'a'}, [A]),
        ('a', {A: 'a', B: 'b'}, [A]),
        ('a', {A: ''}, [A]),
        ('a', {A: 'b', B: 'a'}, [B]),
        ('a', {B: 'a'}, [B]),
        ('a', {A: 'b'}, []),
        ('a', {B: 'b'}, []),
        # which of the two it is cannot be known
        ('a', {A: 'b', B: 'a', C: 'a'}, [B, C]))
    def test_table(self, serial, there, addresses):
        word = values.Disabled(A, serial, '', '')
        self.assertEqual(dict.fromkeys(addresses, (word,)), identity.disabled(
            {a: device(a, s) for a, s in there.items()}, [word]))


@ddt.ddt
class KeyTest(testtools.TestCase):

    @ddt.data(
        # serial numbers decide where both are known
        (('a', '1', 'x'), ('b', '1', 'y'), True),
        (('a', '1', 'x'), ('a', '2', 'x'), False),
        # else address and product
        (('a', '', 'x'), ('a', '2', 'x'), True),
        (('a', '1', 'x'), ('a', '', 'x'), True),
        (('a', '1', 'x'), ('a', '', 'y'), False),
        (('a', '', ''), ('a', '', 'y'), True),
        (('a', '', 'x'), ('b', '', 'x'), False),
        # every card, but not because the number of one cannot be read
        (('', '', ''), ('a', '1', 'x'), True),
        (('', '1', ''), ('a', '', 'x'), False))
    @ddt.unpack
    def test_means(self, row, card, means):
        self.assertIs(means, model.CardKey(*row).means(model.CardKey(*card)))
