# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What buyers of GPU clouds ask for: NVIDIA's AI Cloud Validation suite.

docs/source/buyer.rst says how to run it on a cloud. Nothing of the suite is
here: who runs it fetches it. make buyer runs it on a cloud of simulated hosts.

    stubs          answers the suite's steps, by openstacksdk and nova-accel
    vm.yaml        the steps for servers
    fleet.yaml     the steps for the whole cloud
    __main__       fetches the suite, and starts judge in a network of its own
    judge          the cloud, the runs of the suite, and the verdict
    guest          answers ssh in place of simulated guests
    permitted.txt  what is skipped, and why
"""

import pathlib

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
HOME = ROOT / 'build/buyer'
