# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Admin commands of NVMe, as the controller gets them.

The controller answers at the ioctl, byte by byte as the NVM Express Base
Specification 2.0 has it.
"""

import ctypes
import dataclasses
import errno
import json
import struct

import ddt
import fixtures
import testtools

from nova_accel.host import nvme_admin
from nova_accel.host.nvme_admin import Namespace

PF = '0000:5e:00.0'
FD = 77
#: controller identifiers: of the PF, and of its VFs
OWN, VF1, VF2 = 0x21, 0x31, 0x32
_INVALID_FIELD, _INVALID_FORMAT, _PRIVATE = 0x4002, 0x410a, 0x4119
_SECONDARY_STATE = 0x4120
_FREE = 1 << 40


class Disk:
    """A controller with namespaces: number -> its fields."""

    def __init__(self):
        self.oacs, self.fna, self.sanicap, self.oncs = 0xff, 0, 0, 0
        #: log2 of bytes of data, bytes of metadata
        self.formats = [(9, 0), (12, 0), (9, 8)] + [(9, 64)] * 15 + [(12, 64)]
        self.namespaces = {}
        self.add(1, 1000, 0)
        #: what was done, in words
        self.log = []
        self.sanitize = (0, 0, 0)
        self.health = (0, 300, 100, 10, 0)
        self.secondaries = [(VF1, 1, 1), (VF2, 2, 0)]
        #: controller -> queues and interrupts
        self.resources = {VF1: [3, 2]}
        #: whether Format NVM reaches namespaces of others
        self.formats_all = False
        #: opcodes that are refused
        self.refuses = ()

    def add(self, number, blocks, index, controllers=(OWN,), protection=0):
        self.namespaces[number] = {
            'blocks': blocks, 'flbas': index & 0xf | (index >> 4) << 5,
            'dps': protection, 'controllers': set(controllers), 'shared': True}

    def ioctl(self, fd, request, argument=None):
        assert fd == FD
        if request == 0x4e46:
            self.log.append('rescan')
            return 0
        assert request == 3 << 30 | 72 << 16 | ord('N') << 8 | 0x41
        (opcode, _, _, nsid, _, _, _, address, _, size, cdw10, cdw11, _, _, _,
         _, timeout, _) = struct.unpack('=BBHIIIQQII6III', argument)
        assert 0 < timeout <= 3_600_000
        if opcode != 0x80:
            assert timeout <= 60_000
        if opcode in self.refuses:
            return _INVALID_FIELD
        self.page = ((ctypes.c_char * size).from_address(address) if size
                     else b'')
        answer = {0x02: self.get_log, 0x06: self.identify, 0x0d: self.manage,
                  0x15: self.attach, 0x1c: self.virtualize,
                  0x80: self.format, 0x84: self.start_sanitize}[opcode](
                      nsid, cdw10, cdw11)
        status, result = answer if isinstance(answer, tuple) else (answer, 0)
        struct.pack_into('=I', argument, 68, result)
        return status or 0

    def put(self, layout, offset, *values):
        struct.pack_into(layout, self.page, offset, *values)

    def get_log(self, nsid, cdw10, cdw11):
        assert (cdw10 & ~0xff, nsid) == (127 << 16, 0xffffffff)
        if cdw10 & 0xff == 0x81:
            self.put('<HHI', 0, *self.sanitize)
        else:
            assert cdw10 & 0xff == 0x02
            # warning, kelvins, spare, threshold, used
            self.put('<BHBBB', 0, *self.health)

    def identify(self, nsid, cdw10, cdw11):
        ctypes.memset(self.page, 0, 4096)
        cns, begin = cdw10 & 0xff, cdw10 >> 16
        space = self.namespaces.get(nsid)
        if cns in (0x00, 0x11):
            if nsid != 0xffffffff and (space is None or (
                    cns == 0 and OWN not in space['controllers'])):
                return None
            if space:
                self.put('<QQ', 0, space['blocks'], space['blocks'])
                self.put('<B', 26, space['flbas'])
                self.put('<B', 29, space['dps'])
            self.put('<B', 25, len(self.formats) - 1)
            for n, (exponent, metadata) in enumerate(self.formats):
                self.put('<HB', 128 + 4 * n, metadata, exponent)
        elif cns == 0x01:
            self.put('<20s', 4, b'S1'.ljust(20))
            self.put('<8s', 64, b'F1'.ljust(8))
            self.put('<H', 78, OWN)
            self.put('<H', 256, self.oacs)
            self.put('<Q', 296, _FREE)
            self.put('<I', 328, self.sanicap)
            self.put('<HxxB', 520, self.oncs, self.fna)
        elif cns in (0x02, 0x10):
            found = [n for n in sorted(self.namespaces) if n > nsid and (
                cns == 0x10 or OWN in self.namespaces[n]['controllers'])]
            for n, number in enumerate(found[:1024]):
                self.put('<I', 4 * n, number)
        elif cns == 0x12:
            found = sorted(space['controllers'])
            self.put(f'<H{len(found)}H', 0, len(found), *found)
        elif cns == 0x15:
            found = [s for s in self.secondaries if s[0] >= begin][:127]
            self.put('<B', 0, len(found))
            for n, (id_, vf, online) in enumerate(found):
                self.put('<HHB3xHHH', 32 + 32 * n, id_, OWN, online, vf,
                         *self.resources.get(id_, (0, 0)))
        else:
            raise AssertionError(cns)

    def manage(self, nsid, cdw10, cdw11):
        if cdw10 == 1:
            assert nsid == 0xffffffff
            self.log.append('delete all')
            self.namespaces = {}
            return None
        assert (nsid, cdw10, cdw11) == (0, 0, 0)
        blocks, capacity = struct.unpack_from('<QQ', self.page)
        assert blocks == capacity
        flbas, = struct.unpack_from('<B', self.page, 26)
        number = len(self.namespaces) + 1
        self.add(number, blocks, flbas & 0xf | (flbas >> 5) << 4, ())
        self.log.append(f'create {blocks}')
        return 0, number

    def attach(self, nsid, cdw10, cdw11):
        count, controller = struct.unpack_from('<HH', self.page)
        assert count == 1
        space = self.namespaces[nsid]
        if cdw10 == 0:
            if space['controllers'] and not space['shared']:
                return _PRIVATE
            space['controllers'].add(controller)
        else:
            assert cdw10 == 1
            space['controllers'].remove(controller)
        self.log.append(f'{"de" if cdw10 else "at"}tach {nsid} '
                        f'{controller:#x}')

    def virtualize(self, nsid, cdw10, cdw11):
        action, resource = cdw10 & 0xf, cdw10 >> 8 & 7
        controller = cdw10 >> 16
        mine = self.resources.setdefault(controller, [0, 0])
        if action == 8:
            mine[resource] = cdw11
            return 0, cdw11
        if action == 9 and not all(mine):
            return _SECONDARY_STATE
        if action == 7:
            mine[:] = 0, 0
        self.log.append(f'{ {7: "offline", 9: "online"}[action]} '
                        f'{controller:#x}')
        return None

    def format(self, nsid, cdw10, cdw11):
        space = self.namespaces[nsid]
        if OWN not in space['controllers'] and not self.formats_all:
            return _INVALID_FORMAT
        space['flbas'] = cdw10 & 0x1f | (cdw10 >> 12 & 3) << 5
        space['dps'] = cdw10 >> 5 & 0xf
        self.log.append(f'format {nsid} {cdw10 >> 9 & 7}')

    def start_sanitize(self, nsid, cdw10, cdw11):
        assert (nsid, cdw11) == (0, 0)
        self.log.append(f'sanitize {cdw10:#x}')


@ddt.ddt
class NvmeAdminTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.disk = Disk()
        self.useFixture(fixtures.MonkeyPatch('fcntl.ioctl', self.disk.ioctl))

    def refused(self, number, call, *args):
        error = self.assertRaises(OSError, call, FD, *args)
        self.assertEqual(errno.errorcode[number],
                         errno.errorcode[error.errno], error)
        return str(error)

    def test_numbers(self):
        # _IOWR('N', 0x41, struct nvme_passthru_cmd), _IO('N', 0x46)
        self.assertEqual(
            (3 << 30 | 72 << 16 | ord('N') << 8 | 0x41, ord('N') << 8 | 0x46,
             72), (nvme_admin.ADMIN, nvme_admin.RESCAN,
                   nvme_admin.COMMAND.size))

    def test_controller(self):
        self.disk.add(3, 77, 18)
        self.disk.add(4, 5, 0, ())
        self.assertEqual(nvme_admin.Controller(
            'S1', 'F1', None, True, True,
            (Namespace(1000, 512, 0), Namespace(77, 4096, 64)), 1, _FREE),
            nvme_admin.read_controller(FD))
        self.disk.oacs = 0
        found = nvme_admin.read_controller(FD)
        self.assertEqual((False, False, 0, 0), (
            found.has_format, found.has_management, found.detached,
            found.unallocated))

    @ddt.data((0, 0, ()), (1, 0, ('CES',)), (6, 0, ('BES',)),
              (0, 8, ('WZS',)), (7, 0xff, ('CES', 'BES', 'WZS')))
    @ddt.unpack
    def test_erases(self, sanicap, oncs, expected):
        self.disk.sanicap, self.disk.oncs = sanicap, oncs
        found = nvme_admin.read_controller(FD)
        self.assertEqual(expected, found.erases)
        # as the privileged process and a capture return it
        self.assertEqual(found, nvme_admin.Controller.from_tuple(json.loads(
            json.dumps(dataclasses.astuple(found)))))

    @ddt.data((0, False), (1, True), (2, True), (4, False), (7, True))
    @ddt.unpack
    def test_format_of_one_is_of_all(self, fna, found):
        self.disk.fna = fna
        self.assertEqual(found,
                         nvme_admin.read_controller(FD).formats_all)

    def test_many_namespaces(self):
        for number in range(1, 1500):
            self.disk.add(number, number, 0)
        self.assertEqual(1499,
                         len(nvme_admin.read_controller(FD).namespaces))

    def test_controller_that_repeats_itself(self):
        """It is not read for ever: the privileged process would grow."""
        self.disk.namespaces = {}
        for number in range(1, 1025):
            self.disk.add(number, 10, 0)
        identify = self.disk.identify

        def repeat(nsid, cdw10, cdw11):
            return identify(0 if cdw10 & 0xff in (2, 0x10) else nsid,
                            cdw10 & 0xffff, cdw11)
        self.disk.identify = repeat
        self.refused(errno.EIO, nvme_admin.read_controller)
        self.disk.namespaces = {}
        self.disk.secondaries = [(n, n, 1) for n in range(1, 128)]
        self.refused(errno.EIO, nvme_admin.read_secondaries, PF)

    def test_controller_that_goes_on(self):
        def goes_on(nsid, cdw10, cdw11):
            if cdw10 & 0xff not in (2, 0x10):
                return Disk.identify(self.disk, nsid, cdw10, cdw11)
            self.disk.put('<1024I', 0, *range(nsid + 1, nsid + 1025))
        self.disk.identify = goes_on
        self.refused(errno.EIO, nvme_admin.read_controller)

    def test_status_that_the_controller_answers(self):
        self.disk.refuses = (0x06,)
        self.assertIn('0x4002', self.refused(errno.EIO,
                                             nvme_admin.read_controller))

    # Sanitize

    @ddt.data((0, None), (1, 'crypto'), (2, 'block'), (4, 'overwrite'),
              (6, 'block'), (7, 'crypto'))
    @ddt.unpack
    def test_best_method(self, sanicap, method):
        self.disk.sanicap = sanicap | 3 << 29
        self.assertEqual(method, nvme_admin.read_controller(FD).sanitize)

    def test_sanitize(self):
        for method in ('crypto', 'block', 'overwrite'):
            nvme_admin.start_sanitize(FD, method)
        nvme_admin.exit_sanitize_failure(FD)
        # AUSE is bit 3, one pass of overwriting bit 4
        self.assertEqual(['sanitize 0xc', 'sanitize 0xa', 'sanitize 0x1b',
                          'sanitize 0x1'], self.disk.log)
        self.disk.refuses = (0x84,)
        self.refused(errno.EIO, nvme_admin.start_sanitize, 'crypto')

    @ddt.data(((0xffff, 0, 0), ('never', 99, None)),
              ((0x8000, 0x102, 0xc), ('running', 50, 'crypto')),
              ((0xffff, 0x101, 0xa), ('done', 99, 'block')),
              ((0xffff, 0x4, 0x1b), ('done', 99, 'overwrite')),
              ((0x1000, 0x3, 0x4), ('failed', 6, None)))
    @ddt.unpack
    def test_status_of_sanitize(self, log, expected):
        self.disk.sanitize = log
        self.assertEqual(nvme_admin.SanitizeStatus(*expected),
                         nvme_admin.read_sanitize_status(FD))

    def test_health(self):
        self.disk.health = (0b1001, 350, 7, 10, 103)
        self.assertEqual(nvme_admin.HealthLog(
            warning=9, spare=7, least_spare=10, used=103),
            nvme_admin.read_health(FD))
        self.disk.refuses = (0x02,)
        self.refused(errno.EIO, nvme_admin.read_health)

    # Format NVM

    @ddt.data((0, 1), (1 << 2, 2))
    @ddt.unpack
    def test_format(self, fna, erase):
        self.disk.fna = fna
        self.disk.add(3, 77, 18, protection=0b1010)
        before = {n: dict(s) for n, s in self.disk.namespaces.items()}
        nvme_admin.format_namespaces(FD, PF, [])
        self.assertEqual([f'format 1 {erase}', f'format 3 {erase}'],
                         self.disk.log)
        # the block format and the protection stay
        self.assertEqual(before, self.disk.namespaces)

    def test_format_with_other_blocks(self):
        self.disk.add(2, 77, 2, protection=1)
        self.disk.add(3, 77, 2, protection=1)
        nvme_admin.format_namespaces(FD, PF, [
            Namespace(125, 4096, 0), Namespace(77, 512, 8),
            Namespace(77, 512, None)])
        self.assertEqual([(1, 0), (2, 1), (2, 1)], [
            (n['flbas'], n['dps']) for n in self.disk.namespaces.values()])
        nvme_admin.format_namespaces(FD, PF, [
            Namespace(1, 4096, 64), Namespace(1, 4096, None),
            Namespace(1, 512, 0)])
        # LBAF 18, 1 and 0; protection is for its own format only
        self.assertEqual([(18 & 0xf | 1 << 5, 0), (1, 0), (0, 0)], [
            (n['flbas'], n['dps']) for n in self.disk.namespaces.values()])

    def test_format_that_cannot_be(self):
        for formats, number in (([Namespace(1, 1024, 0)], errno.EOPNOTSUPP),
                                ([Namespace(1, 512, 0)] * 2, errno.EINVAL)):
            self.refused(number, nvme_admin.format_namespaces, PF, formats)
        self.disk.add(9, 5, 0, ())
        self.assertIn('namespace 9', self.refused(
            errno.EBUSY, nvme_admin.format_namespaces, PF, []))
        self.disk.oacs = 1 << 3
        self.refused(errno.EOPNOTSUPP, nvme_admin.format_namespaces, PF, [])
        self.assertEqual([], self.disk.log)

    # Namespace Management

    def test_restore(self):
        self.disk.add(7, 5, 0, ())
        wanted = [Namespace(100, 4096, 0), Namespace(50, 4096, 64)]
        nvme_admin.restore_namespaces(FD, PF, wanted)
        self.assertEqual(
            ['delete all', 'create 100', 'attach 1 0x21', 'create 50',
             'attach 2 0x21', 'rescan'], self.disk.log)
        self.assertEqual(tuple(wanted),
                         nvme_admin.read_controller(FD).namespaces)

    @ddt.data((0, 512), (1, 4096))
    @ddt.unpack
    def test_restore_of_the_full_capacity(self, index, size):
        self.disk.namespaces = {}
        self.disk.add(4, 5, index, ())
        nvme_admin.restore_namespaces(FD, PF, [])
        self.assertEqual((Namespace(_FREE // size, size, 0),),
                         nvme_admin.read_controller(FD).namespaces)

    def test_restore_after_all_were_deleted(self):
        self.disk.namespaces = {}
        nvme_admin.restore_namespaces(FD, PF, [])
        self.assertEqual((Namespace(_FREE // 512, 512, 0),),
                         nvme_admin.read_controller(FD).namespaces)
        self.assertNotIn('delete all', self.disk.log)

    def test_restore_that_cannot_be(self):
        # nothing is deleted before that is known
        self.refused(errno.EOPNOTSUPP, nvme_admin.restore_namespaces, PF,
                     [Namespace(1, 1024, 0)])
        self.disk.oacs = 1 << 1
        self.refused(errno.EOPNOTSUPP, nvme_admin.restore_namespaces, PF, [])
        self.disk.oacs, self.disk.refuses = 0xff, (0x0d,)
        self.refused(errno.EIO, nvme_admin.restore_namespaces, PF, [])
        self.assertEqual([], self.disk.log)

    # VFs

    def test_secondaries(self):
        self.disk.secondaries.append((0x40, 0, 1))
        self.disk.add(2, 10, 0, (VF1, OWN))
        self.disk.add(3, 10, 0, (VF1,))
        self.assertEqual([nvme_admin.Secondary(1, VF1, True, (2, 3), (OWN,),
                                               3, 2),
                          nvme_admin.Secondary(2, VF2, False, ())],
                         nvme_admin.read_secondaries(FD, PF))
        self.disk.add(4, 10, 0, (VF1, VF2))
        one, two = nvme_admin.read_secondaries(FD, PF)
        self.assertEqual(((2, 3, 4), (OWN, VF2), (4,), (VF1,)), (
            one.namespaces, one.others, two.namespaces, two.others))
        # as they come from the privileged process, and from a capture
        self.assertEqual(one, nvme_admin.Secondary.from_tuple(
            [1, VF1, True, [2, 3, 4], [OWN, VF2], 3, 2]))
        # of a capture by an earlier release
        self.assertEqual(nvme_admin.Secondary(1, VF1, True, (2,), (OWN,)),
                         nvme_admin.Secondary.from_tuple(
                             [1, VF1, True, [2], [OWN]]))
        self.assertEqual(nvme_admin.Secondary(1, VF1, True),
                         nvme_admin.Secondary.from_tuple([1, VF1, True]))
        self.disk.oacs = 1 << 7
        self.assertEqual([None, None], [
            found.namespaces for found
            in nvme_admin.read_secondaries(FD, PF)])
        self.disk.oacs = 0xff
        self.disk.secondaries = [(n, n, 1) for n in range(1, 300)]
        self.assertEqual(299, len(nvme_admin.read_secondaries(FD, PF)))
        self.disk.oacs = 0x7f
        self.refused(errno.EOPNOTSUPP, nvme_admin.read_secondaries, PF)

    def test_offline_and_online(self):
        nvme_admin.set_offline(FD, VF1)
        # offline takes its resources away
        self.assertIn('0x4120', self.refused(
            errno.EIO, nvme_admin.set_online, VF1, 0, 0))
        nvme_admin.set_online(FD, VF1, 5, 4)
        nvme_admin.set_online(FD, VF2, 3, 2)
        self.assertEqual(['offline 0x31', 'online 0x31', 'online 0x32'],
                         self.disk.log)
        self.assertEqual({VF1: [5, 4], VF2: [3, 2]}, self.disk.resources)
        self.disk.refuses = (0x1c,)
        self.refused(errno.EIO, nvme_admin.set_online, VF1, 5, 4)

    def test_namespaces_of_a_vf(self):
        self.disk.add(2, 10, 0, (VF1,))
        self.disk.add(3, 10, 0, (VF2,))
        self.disk.add(5, 10, 0, (VF1, OWN))
        self.assertEqual([2, 5],
                         nvme_admin.private_namespaces(FD, PF, VF1))
        self.disk.add(6, 10, 0, (VF1, VF2))
        self.assertIn('namespace 6', self.refused(
            errno.EBUSY, nvme_admin.private_namespaces, PF, VF1))
        self.disk.oacs = 1 << 7
        self.refused(errno.EOPNOTSUPP, nvme_admin.private_namespaces, PF, VF1)

    def test_format_for_a_vf(self):
        self.disk.add(2, 10, 1, (VF1,))
        self.disk.formats_all = True
        nvme_admin.format_of_secondary(FD, PF, [2])
        self.assertEqual(['format 2 1'], self.disk.log)
        self.assertEqual(1, self.disk.namespaces[2]['flbas'])

    def test_format_for_a_vf_by_attaching(self):
        self.disk.add(2, 10, 0, (VF1,))
        nvme_admin.format_of_secondary(FD, PF, [2])
        self.assertEqual(['attach 2 0x21', 'format 2 1', 'detach 2 0x21'],
                         self.disk.log)
        # killed before it was detached
        self.disk.add(2, 10, 0, (VF1, OWN))
        self.disk.log.clear()
        nvme_admin.format_of_secondary(FD, PF, [2])
        self.assertEqual(['format 2 1', 'detach 2 0x21'], self.disk.log)
        self.assertEqual({VF1}, self.disk.namespaces[2]['controllers'])

    def test_format_for_a_vf_that_cannot_be(self):
        self.disk.add(2, 10, 0, (VF1,))
        self.disk.namespaces[2]['shared'] = False
        self.assertIn('0x4119', self.refused(
            errno.EIO, nvme_admin.format_of_secondary, PF, [2]))
        self.assertEqual({VF1}, self.disk.namespaces[2]['controllers'])
        self.disk.namespaces[2]['shared'] = True
        self.disk.refuses = (0x80,)
        self.refused(errno.EIO, nvme_admin.format_of_secondary, PF, [2])
        self.assertEqual({VF1}, self.disk.namespaces[2]['controllers'])
        self.disk.oacs = 1 << 3
        self.refused(errno.EOPNOTSUPP, nvme_admin.format_of_secondary, PF,
                     [2])

    @ddt.data(1, 2)
    def test_format_for_a_vf_would_be_of_all(self, fna):
        self.disk.add(2, 10, 0, (VF1,))
        self.disk.fna, self.disk.formats_all = fna, True
        self.assertIn('all namespaces', self.refused(
            errno.EOPNOTSUPP, nvme_admin.format_of_secondary, PF, [2]))
        self.assertEqual([], self.disk.log)


@ddt.ddt
class NamespaceTest(testtools.TestCase):

    @ddt.data(Namespace(1, 512, 0), Namespace(1 << 60, 4096, None),
              Namespace(0, 512, 64))
    def test_text(self, namespace):
        self.assertEqual(namespace, Namespace.parse(str(namespace)))

    @ddt.data('', 'x', '1x', '1x512+', '-1x512', '1x512+8 ', 'ax512')
    def test_other_text(self, text):
        self.assertRaises(ValueError, Namespace.parse, text)

    def test_what_is_not_known_is_not_compared(self):
        known, other = Namespace(1, 512, 0), Namespace(1, 512, 8)
        unknown = Namespace(1, 512, None)
        self.assertFalse(known.is_like(other))
        self.assertTrue(known.is_like(unknown) and unknown.is_like(other))
        self.assertFalse(unknown.is_like(Namespace(2, 512, None)))
        self.assertFalse(unknown.is_like(Namespace(1, 4096, None)))
