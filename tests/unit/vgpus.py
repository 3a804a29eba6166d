# Licensed under the Apache License, Version 2.0. See LICENSE.
"""GPUs of a simulated host that make vGPUs, in each shape."""

GPU = '0000:41:00.0'
VF = ['0000:41:00.1', '0000:41:00.2', '0000:41:00.3', '0000:41:00.4']
TYPES = [{'id': 'nvidia-557', 'name': 'NVIDIA A40-1Q', 'units': 1},
         {'id': 'nvidia-558', 'name': 'NVIDIA A40-2Q', 'units': 2},
         {'id': 'nvidia-1560', 'name': 'NVIDIA A40-4Q', 'units': 4}]
NUMBERS = [{**t, 'id': t['id'].removeprefix('nvidia-')} for t in TYPES]
TRAIT = {name: f'CUSTOM_NVIDIA_2235_A40_{size}Q' for name, size in (
    ('nvidia-557', 1), ('nvidia-558', 2), ('nvidia-1560', 4))}
MTTY = {'name': 'mtty', 'units': 24, 'types': [
    {'id': 'mtty-1', 'name': 'Single port serial', 'units': 1},
    {'id': 'mtty-2', 'name': 'Dual port serial', 'units': 2}]}


def gpu(framework, **more):
    vfs = 0 if framework == 'mdev' else 4
    return {'address': GPU, 'vendor': '10de', 'device': '2235', 'units': 4,
            'numa_node': 1, 'framework': framework, 'total_vfs': vfs,
            'vfs': vfs,
            'types': NUMBERS if framework == 'vendor-vfio' else TYPES, **more}
