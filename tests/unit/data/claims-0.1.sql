BEGIN TRANSACTION;
CREATE TABLE claims (
    uuid TEXT PRIMARY KEY,
    instance_uuid TEXT NOT NULL,
    role TEXT NOT NULL,
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    request_group TEXT NOT NULL,
    device_address TEXT NOT NULL,
    region_index INTEGER,
    handle_type TEXT NOT NULL,
    handle_address TEXT NOT NULL,
    handle TEXT NOT NULL,
    consumer_uuid TEXT NOT NULL,
    state TEXT NOT NULL,
    error TEXT NOT NULL,
    function_uuid TEXT,
    bitstream_id TEXT,
    created_type TEXT,
    prepared INTEGER NOT NULL,
    UNIQUE (handle_type, handle_address)
);
INSERT INTO "claims" VALUES('0e1c3a52-7d64-4a0b-9f1e-000000000001','0e1c3a52-7d64-4a0b-9f1e-000000000101','current','0e1c3a52-7d64-4a0b-9f1e-000000000201','CUSTOM_ACCELERATOR_FPGA','1','0000:5e:00.0',0,'PCI','0000:5e:00.0','{"type": "PCI", "address": "0000:5e:00.0", "managed": true, "companions": [], "parent": null}','0e1c3a52-7d64-4a0b-9f1e-000000000101','Bound','','d8424dc4a4a3c413f89e433683f9040b','0e1c3a52-7d64-4a0b-9f1e-000000000401',NULL,0);
INSERT INTO "claims" VALUES('0e1c3a52-7d64-4a0b-9f1e-000000000002','0e1c3a52-7d64-4a0b-9f1e-000000000102','old','0e1c3a52-7d64-4a0b-9f1e-000000000202','CUSTOM_ACCELERATOR_GPU','','0000:86:00.0',NULL,'PCI','0000:86:00.0','{"type": "PCI", "address": "0000:86:00.0", "managed": false, "companions": ["0000:86:00.1"], "parent": null}','0e1c3a52-7d64-4a0b-9f1e-000000000500','Bound','',NULL,NULL,NULL,0);
INSERT INTO "claims" VALUES('0e1c3a52-7d64-4a0b-9f1e-000000000003','0e1c3a52-7d64-4a0b-9f1e-000000000103','current','0e1c3a52-7d64-4a0b-9f1e-000000000203','CUSTOM_ACCELERATOR_VGPU','1','0000:3b:00.0',NULL,'MDEV','0e1c3a52-7d64-4a0b-9f1e-000000000303','{"type": "MDEV", "address": "0e1c3a52-7d64-4a0b-9f1e-000000000303", "managed": true, "companions": [], "parent": "0000:3b:00.4"}','0e1c3a52-7d64-4a0b-9f1e-000000000103','Bound','',NULL,NULL,'nvidia-558',0);
INSERT INTO "claims" VALUES('0e1c3a52-7d64-4a0b-9f1e-000000000004','0e1c3a52-7d64-4a0b-9f1e-000000000104','current','0e1c3a52-7d64-4a0b-9f1e-000000000204','CUSTOM_ACCELERATOR_VGPU','1','0000:3b:00.0',NULL,'MDEV','0e1c3a52-7d64-4a0b-9f1e-000000000304','{"type": "MDEV", "address": "0e1c3a52-7d64-4a0b-9f1e-000000000304", "managed": true, "companions": [], "parent": "0000:3b:00.4"}','0e1c3a52-7d64-4a0b-9f1e-000000000104','Initial','',NULL,NULL,'nvidia-558',0);
INSERT INTO "claims" VALUES('0e1c3a52-7d64-4a0b-9f1e-000000000005','0e1c3a52-7d64-4a0b-9f1e-000000000105','current','0e1c3a52-7d64-4a0b-9f1e-000000000205','CUSTOM_ACCELERATOR_VGPU','1','0000:3b:00.0',NULL,'MDEV','0e1c3a52-7d64-4a0b-9f1e-000000000305','{"type": "MDEV", "address": "0e1c3a52-7d64-4a0b-9f1e-000000000305", "managed": true, "companions": [], "parent": "0000:3b:00.4"}','0e1c3a52-7d64-4a0b-9f1e-000000000105','Provisioning','',NULL,NULL,'nvidia-558',0);
INSERT INTO "claims" VALUES('0e1c3a52-7d64-4a0b-9f1e-000000000006','0e1c3a52-7d64-4a0b-9f1e-000000000106','current','0e1c3a52-7d64-4a0b-9f1e-000000000206','CUSTOM_ACCELERATOR_VGPU','1','0000:3b:00.0',NULL,'MDEV','0e1c3a52-7d64-4a0b-9f1e-000000000306','{"type": "MDEV", "address": "0e1c3a52-7d64-4a0b-9f1e-000000000306", "managed": true, "companions": [], "parent": "0000:3b:00.4"}','0e1c3a52-7d64-4a0b-9f1e-000000000106','Deleting','busy',NULL,NULL,'nvidia-558',0);
INSERT INTO "claims" VALUES('0e1c3a52-7d64-4a0b-9f1e-000000000007','0e1c3a52-7d64-4a0b-9f1e-000000000107','current','0e1c3a52-7d64-4a0b-9f1e-000000000207','CUSTOM_ACCELERATOR_NVME','1','0000:d8:00.0',NULL,'PCI','0000:d8:00.0','{"type": "PCI", "address": "0000:d8:00.0", "managed": true, "companions": [], "parent": null}','0e1c3a52-7d64-4a0b-9f1e-000000000107','Unknown','nova-compute stopped while the device was prepared',NULL,NULL,NULL,1);
CREATE TABLE devices (
    address TEXT PRIMARY KEY,
    device TEXT NOT NULL
);
INSERT INTO "devices" VALUES('0000:5e:00.0','{"address": "0000:5e:00.0", "type": "FPGA", "vendor": "INTEL", "product": "PAC_ARRIA10", "vendor_id": "8086", "product_id": "09c4", "driver": "dfl", "family": "ARRIA10", "numa_node": 0, "memory_mib": 8192, "shell_id": "0123000200000185", "regions": [{"index": 0, "region_type_uuid": "69528db6eb31577a8c3668f9faa081f6", "function_uuid": "d8424dc4a4a3c413f89e433683f9040b", "handles": [{"type": "PCI", "address": "0000:5e:00.0", "managed": true, "companions": [], "parent": null}], "bitstream_id": "0e1c3a52-7d64-4a0b-9f1e-000000000401", "function_name": "nlb", "programmable": true, "open_to_guest": true, "health": "ok", "reason": ""}], "handles": [], "creatable": [], "traits": ["CUSTOM_FPGA_INTEL"], "volatile_traits": [], "health": "ok", "reason": ""}');
INSERT INTO "devices" VALUES('0000:3b:00.0','{"address": "0000:3b:00.0", "type": "VGPU", "vendor": "NVIDIA", "product": "A10", "vendor_id": "10de", "product_id": "2236", "driver": "vgpu", "family": null, "numa_node": null, "memory_mib": null, "shell_id": null, "regions": [], "handles": [{"type": "MDEV", "address": "0e1c3a52-7d64-4a0b-9f1e-000000000303", "managed": true, "companions": [], "parent": "0000:3b:00.4"}], "creatable": [{"name": "nvidia-558", "trait": "CUSTOM_VGPU_NVIDIA_558", "available": 11}], "traits": [], "volatile_traits": ["CUSTOM_VGPU_NVIDIA_558"], "health": "gone", "reason": "its driver does not find it any more"}');
CREATE TABLE loaded (
    device_address TEXT NOT NULL,
    region_index INTEGER NOT NULL,
    function_uuid TEXT NOT NULL,
    bitstream_id TEXT NOT NULL,
    function_name TEXT,
    content TEXT NOT NULL,
    PRIMARY KEY (device_address, region_index)
);
INSERT INTO "loaded" VALUES('0000:5e:00.0',0,'d8424dc4a4a3c413f89e433683f9040b','0e1c3a52-7d64-4a0b-9f1e-000000000401','nlb','sha512-0');
INSERT INTO "loaded" VALUES('0000:af:00.0',1,'d8424dc4a4a3c413f89e433683f9040b','0e1c3a52-7d64-4a0b-9f1e-000000000401',NULL,'sha512-0');
COMMIT;
