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
    restore_function TEXT,
    restore_bitstream TEXT,
    created_type TEXT,
    prepared INTEGER NOT NULL,
    UNIQUE (handle_type, handle_address)
);
INSERT INTO "claims" VALUES('0e1c3a52-7d64-4a0b-9f1e-000000000001','0e1c3a52-7d64-4a0b-9f1e-000000000101','current','0e1c3a52-7d64-4a0b-9f1e-000000000201','CUSTOM_ACCELERATOR_FPGA','1','0000:5e:00.0',0,'PCI','0000:5e:00.0','{"type": "PCI", "address": "0000:5e:00.0", "managed": true, "companions": [], "parent": null}','0e1c3a52-7d64-4a0b-9f1e-000000000101','Bound','','d8424dc4a4a3c413f89e433683f9040b','0e1c3a52-7d64-4a0b-9f1e-000000000401',NULL,1);
CREATE TABLE devices (
    address TEXT PRIMARY KEY,
    device TEXT NOT NULL
);
CREATE TABLE loaded (
    device_address TEXT NOT NULL,
    region_index INTEGER NOT NULL,
    function_uuid TEXT,
    bitstream_id TEXT,
    function_name TEXT,
    content TEXT,
    PRIMARY KEY (device_address, region_index)
);
INSERT INTO "loaded" VALUES('0000:5e:00.0',0,'d8424dc4a4a3c413f89e433683f9040b','0e1c3a52-7d64-4a0b-9f1e-000000000401','nlb','sha512-0');
INSERT INTO "loaded" VALUES('0000:af:00.0',1,NULL,NULL,NULL,NULL);
CREATE TABLE reserved (
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    reserved INTEGER NOT NULL,
    PRIMARY KEY (provider_uuid, resource_class)
);
INSERT INTO "reserved" VALUES('p','VGPU',1);
PRAGMA user_version = 1;
COMMIT;
