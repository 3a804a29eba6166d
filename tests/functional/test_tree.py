# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel tree on a cloud: who has what, in the words of all services."""

import json
import os

from nova_accel.cmd import page
from nova_accel.cmd import tree
from tests.functional import base
from tests.functional.base import card, CRYPTO, fpga_flavor, NLB0
from tests.unit import commands

A, B = '0000:5e:00.0', '0000:81:00.0'


class TreeTest(base.AcceleratorTestBase):

    HOSTS = {'compute1': {'cards': [card(A), card(B, [CRYPTO])]},
             'compute2': {}}

    def test_tree(self):
        self.upload_bitstream(NLB0, properties={
            'accel:function_id': NLB0, 'accel:function_name': 'nlb0'})
        server = self.boot(fpga_flavor(function_id=NLB0))
        self.become_operator()
        done = commands.run('tree', '-f', 'json', tree=tree.Tree)
        self.assertEqual(0, done.returncode, done.stderr)
        rows = {row.pop('Provider'): row for row in json.loads(done.stdout)}
        self.assertEqual({f'compute1_accel_{A}', f'compute1_accel_{B}',
                          f'compute1_accel_{A}_region0',
                          f'compute1_accel_{B}_region0'}, set(rows))
        self.assertEqual(
            {'Host': 'compute1', 'Class': 'CUSTOM_ACCELERATOR_FPGA',
             'UUID': self.provider(f'compute1_accel_{A}_region0')['uuid'],
             'What': 'FPGA INTEL PAC_ARRIA10', 'Function': 'nlb0',
             'Function ID': NLB0, 'Total': 1, 'Used': 1, 'Reserved': 0,
             'Held by': [{'id': server['id'], 'name': server['name'],
                          'amount': 1}], 'Health': 'ok'},
            rows[f'compute1_accel_{A}_region0'])
        self.assertEqual(
            (None, CRYPTO, 1, 0, 'programmable'),
            tuple(rows[f'compute1_accel_{B}_region0'][n] for n in (
                'Function', 'Function ID', 'Total', 'Used', 'Health')))
        self.assertEqual('FPGA INTEL PAC_ARRIA10',
                         rows[f'compute1_accel_{A}']['What'])
        path = os.path.join(self.directory, 'page.html')
        done = commands.run('page', path, page=page.Page)
        self.assertEqual(0, done.returncode, done.stderr)
        with open(path) as file:
            self.assertIn(f'{server["name"]} <small>nlb0</small>', file.read())
