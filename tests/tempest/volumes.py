# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A driver of Cinder whose volumes are files of both compute hosts.

domains.py gives them to QEMU as files; Nova takes them for local disks.
"""

import os
import pathlib

from cinder.volume import driver

from tests.tempest import domains


class Files(driver.VolumeDriver):

    VERSION = '1'

    def check_for_setup_error(self):
        pathlib.Path(domains.VOLUMES).mkdir(exist_ok=True)

    def _update_volume_stats(self):
        self._stats = {
            'volume_backend_name': 'files', 'vendor_name': 'tests',
            'driver_version': self.VERSION, 'storage_protocol': 'local',
            'total_capacity_gb': 1000, 'free_capacity_gb': 'infinite',
            'reserved_percentage': 0, 'multiattach': False}

    @staticmethod
    def _path(of) -> str:
        return os.path.join(domains.VOLUMES, of['id'])

    def create_volume(self, volume):
        with open(self._path(volume), 'ab') as file:
            file.truncate(volume['size'] << 30)

    def delete_volume(self, volume):
        pathlib.Path(self._path(volume)).unlink(missing_ok=True)

    def extend_volume(self, volume, new_size):
        os.truncate(self._path(volume), new_size << 30)

    def create_snapshot(self, snapshot):
        self._copy({'id': snapshot['volume_id']}, snapshot)

    delete_snapshot = delete_volume

    def create_volume_from_snapshot(self, volume, snapshot):
        self._copy(snapshot, volume)
        self.create_volume(volume)

    create_cloned_volume = create_volume_from_snapshot

    def _copy(self, before, after):
        # almost all of it is holes
        self._execute('cp', '--sparse=always', self._path(before),
                      self._path(after))

    def copy_image_to_volume(self, context, volume, image_service, image_id,
                             disable_sparse=False):
        with open(self._path(volume), 'wb') as file:
            image_service.download(context, image_id, file)
        self.create_volume(volume)

    def copy_volume_to_image(self, context, volume, image_service, image_meta):
        # the guests need no more than the beginning
        with open(self._path(volume), 'rb') as file, open(
                f'{self._path(volume)}.image', 'w+b') as image:
            image.write(file.read(1 << 20))
            image.seek(0)
            image_service.update(context, image_meta['id'], {}, image)
        os.unlink(image.name)

    def initialize_connection(self, volume, connector):
        return {'driver_volume_type': 'local',
                'data': {'device_path': self._path(volume)}}

    def terminate_connection(self, volume, connector, **kwargs):
        pass

    def ensure_export(self, context, volume):
        pass

    remove_export = ensure_export

    def create_export(self, context, volume, connector):
        pass
