# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A libnvfm with a Fabric Manager of one partition, made by a C compiler."""

import os
import shutil
import subprocess

import fixtures

from nova_accel.host import nvfm

#: names, arguments and layouts as in nv_fm_agent.h and nv_fm_types.h; what is
#: active outlives the process, as it does with Fabric Manager
_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned version; char address[256]; unsigned milliseconds;
                 unsigned is_socket; enum { NONE, INET } kind; } parameters;
typedef struct { unsigned module; char uuid[80], bus[32];
                 unsigned links, most, rate; } gpu;
typedef struct { unsigned id, active, count; gpu gpus[16]; } partition;
typedef struct { unsigned version, count, most; partition all[64]; } list;
#define HANDLE ((void *)0x123456789abcUL)
#define ACTIVE getenv("NVFM_ACTIVE")
int fmLibInit(void) { return 0; }
int fmLibShutdown(void) { return 0; }
int fmConnect(parameters *p, void **handle)
{
    if (p->version != (sizeof *p | 2 << 24))
        return -6;
    if (strcmp(p->address, "192.0.2.1:6666") || p->kind != INET)
        return -9;
    *handle = HANDLE;
    return 0;
}
int fmDisconnect(void *handle) { return 0; }
int fmGetSupportedFabricPartitions(void *handle, list *found)
{
    if (handle != HANDLE)
        return -1;
    if (found->version != (sizeof *found | 1 << 24))
        return -6;
    found->count = 1;
    found->all[0].id = 5;
    found->all[0].active = !access(ACTIVE, F_OK);
    found->all[0].count = 2;
    found->all[0].gpus[0].module = 4;
    found->all[0].gpus[1].module = 2;
    return 0;
}
int fmActivateFabricPartition(void *handle, unsigned id)
{
    if (handle != HANDLE || id != 5)
        return -1;
    return fclose(fopen(ACTIVE, "w"));
}
int fmDeactivateFabricPartition(void *handle, unsigned id)
{
    if (handle != HANDLE || id != 5)
        return -1;
    return unlink(ACTIVE) ? -4 : 0;
}
"""


class NvfmLibrary(fixtures.Fixture):
    """Programs find the library; its partition has the modules 2 and 4."""

    def _setUp(self):
        compiler = shutil.which('cc')
        if not compiler:
            raise AssertionError('cc is missing: install gcc (bindep.txt).')
        directory = self.useFixture(fixtures.TempDir()).path
        source = os.path.join(directory, 'nvfm.c')
        with open(source, 'w') as file:
            file.write(_SOURCE)
        subprocess.run([compiler, '-shared', '-fPIC', '-o', os.path.join(
            directory, nvfm.LIBRARY), source], check=True)
        self._active = os.path.join(directory, 'active')
        for name, value in (('LD_LIBRARY_PATH', directory),
                            ('NVFM_ACTIVE', self._active)):
            self.useFixture(fixtures.EnvironmentVariable(name, value))

    def is_active(self):
        return os.path.exists(self._active)
