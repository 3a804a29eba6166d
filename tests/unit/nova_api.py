# Licensed under the Apache License, Version 2.0. See LICENSE.
"""compute.api.API of nova-api, with what nova_accel wraps."""

import types
from unittest import mock

import fixtures
from nova.compute import api as compute_api
from nova.compute import flavors
from nova import exception as nova_exception
from nova import objects

from nova_accel.api import expansion

SERVER = '00000000-0000-4000-8000-000000000001'
IMAGE = '00000000-0000-4000-8000-000000000003'


class NovaApi(fixtures.Fixture):
    """Each method of api returns what Nova's own got."""

    def __init__(self, specs):
        """:param specs: name of a flavor -> its extra specs."""
        self.specs = specs
        #: ids of images that the user cannot see
        self.hidden = set()
        #: what else Glance answers
        self.glance_error = None
        #: class: and number, of which Nova's limits were asked
        self.asked = []
        self.limit_error = None
        self.uses_limits = True

    def _setUp(self):
        objects.register_all()
        image_api = types.SimpleNamespace(get=self._image)

        class API:
            def create(self, context, flavor):
                return flavor

            def resize(self, context, instance, flavor_id):
                return flavors.get_flavor_by_flavor_id(flavor_id)

            def _validate_and_build_base_options(self, context, flavor, image):
                return flavor

            def live_migrate(self, context, instance):
                return instance

            def snapshot_volume_backed(self, context, instance, name,
                                       extra_properties=None):
                return extra_properties

            def rebuild(self, context, instance, image):
                return self._checks_for_create_and_rebuild(
                    context, image['id'], image)

            def unshelve(self, context, instance):
                return instance

            def _checks_for_create_and_rebuild(self, context, image_id, image):
                return image
        API.image_api = image_api
        for target, name, value in (
                (expansion.limit, 'Enforcer', lambda usage: (
                    types.SimpleNamespace(enforce=self._enforce(usage)))),
                (expansion.limit_utils, 'use_unified_limits',
                 lambda: self.uses_limits),
                (expansion.placement_limits, '_get_usage', lambda *args: {}),
                (compute_api, 'API', API),
                (flavors, 'get_flavor_by_flavor_id', self.flavor)):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        expansion.install()
        self.api = compute_api.API()

    def _image(self, context, image_id):
        if image_id in self.hidden:
            raise nova_exception.ImageNotFound(image_id=image_id)
        if self.glance_error:
            raise self.glance_error

    def _enforce(self, usage):
        def enforce(project, amounts):
            usage(project, [*amounts])
            self.asked.append((project, dict(amounts)))
            if self.limit_error:
                raise self.limit_error
        return enforce

    def flavor(self, name):
        flavor = objects.Flavor(name=name, extra_specs=self.specs[name])
        flavor.obj_reset_changes()
        return flavor

    def server(self, flavor, vm_state='shelved_offloaded', **image):
        """A server of a flavor; what goes with it in nova.objects.Instance.

        :param image: properties of its image.
        """
        return types.SimpleNamespace(
            uuid=SERVER, project_id='p', flavor=self.flavor(flavor),
            vm_state=vm_state, image_meta=objects.ImageMeta.from_dict(
                {'properties': image}))
