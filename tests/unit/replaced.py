# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Nova's trees of providers with the methods of nova_accel, for one test."""

import fixtures

from nova_accel.virt import provider_trees
from nova_accel import wrapping


class Trees(fixtures.Fixture):

    def _setUp(self):
        for owner, name in provider_trees.REPLACED:
            before = vars(owner).get(name)
            self.addCleanup(restore, owner, name, before)
            restore(owner, name, getattr(before, wrapping.ORIGINAL, before))
        provider_trees.install()


def restore(owner, name, value):
    if value is not None:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
