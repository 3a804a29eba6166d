# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Names of products become traits, for which flavors ask: none is changed."""

import testtools
import yaml

from tests import products

#: lines as the PCI ID repository has them
FILE = """# List of PCI ID's
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t740f  Aldebaran/MI200 [Instinct MI210]
\t75ff  Aqua Vanjaram [Instinct MI455X]
\t\t1002 0001  a board of it
10de  NVIDIA Corporation
\t20b7  GA100GL [A40 PCIe]
\t25b6  GA107GL [A2 / A16]
\t2684  AD102 [GeForce RTX 4090]
\t2b99  GB202GL [RTX PRO 7000 Blackwell]
8086  Intel Corporation
\te2f9  Battlemage [Arc Pro B90]
C 03  Display controller
\t00  VGA compatible controller
""".splitlines()


class GoldenTest(testtools.TestCase):

    def test_names(self):
        """A new name comes into the file by ``python -m tests.products
        --golden``; one that is there stays as it is."""
        self.assertEqual(
            yaml.safe_load(products.GOLDEN.read_text()), products.golden())


class FileTest(testtools.TestCase):

    def test_missing(self):
        self.assertEqual([
            'AMD 75ff has no name: Aqua Vanjaram [Instinct MI455X]',
            'NVIDIA 2b99 has no name: GB202GL [RTX PRO 7000 Blackwell]',
            'INTEL e2f9 has no name: Battlemage [Arc Pro B90]'],
            list(products.missing(FILE)))

    def test_contradicted(self):
        self.assertEqual(['NVIDIA 20b7 is A30 here: GA100GL [A40 PCIe]'],
                         list(products.contradicted(FILE)))
