"""The structs of include/kvconn.h. A test holds them against the header, field by field."""

from __future__ import annotations

import ctypes as c

TRANSFER_ID_MAX = 128


class Region(c.Structure):
    """kvconn_region"""

    _fields_ = [
        ("struct_size", c.c_uint32),
        ("group", c.c_uint32),
        ("name", c.c_char_p),
        ("address", c.c_uint64),
        ("block_stride", c.c_uint64),
        ("block_bytes", c.c_uint64),
        ("num_blocks", c.c_uint32),
        ("index_kind", c.c_uint32),
        ("tokens", c.c_uint32),
        ("heads", c.c_uint32),
        ("first_head", c.c_uint32),
        ("total_heads", c.c_uint32),
        ("token_stride", c.c_uint64),
        ("head_stride", c.c_uint64),
        ("memory", c.c_uint32),
        ("reserved", c.c_uint32),
    ]


class Blocks(c.Structure):
    """kvconn_blocks"""

    _fields_ = [("ids", c.c_void_p), ("count", c.c_uint32), ("first", c.c_uint32)]


class OfferRequest(c.Structure):
    """kvconn_offer_request"""

    _fields_ = [
        ("struct_size", c.c_uint32),
        ("num_groups", c.c_uint32),
        ("transfer_id", c.c_char_p),
        ("groups", c.c_void_p),
        ("token", c.c_uint64),
        ("prompt", c.c_uint64),
        ("after", c.c_uint64),
    ]


class PartialOffer(c.Structure):
    """kvconn_partial_offer"""

    _fields_ = [
        ("struct_size", c.c_uint32),
        ("num_groups", c.c_uint32),
        ("transfer_id", c.c_char_p),
        ("groups", c.c_void_p),
        ("ready", c.c_void_p),
        ("prompt", c.c_uint64),
        ("computing", c.c_void_p),
        ("after", c.c_uint64),
    ]


class LoadRequest(c.Structure):
    """kvconn_load_request"""

    _fields_ = [
        ("struct_size", c.c_uint32),
        ("num_groups", c.c_uint32),
        ("transfer_id", c.c_char_p),
        ("bootstrap_addr", c.c_char_p),
        ("engine_id", c.c_char_p),
        ("groups", c.c_void_p),
        ("token", c.c_uint64),
        ("tokens", c.c_void_p),
        ("prompt", c.c_uint64),
        ("after", c.c_uint64),
    ]


class Completion(c.Structure):
    """kvconn_completion"""

    _fields_ = [
        ("token", c.c_uint64),
        ("code", c.c_int32),
        ("side", c.c_int32),
        ("bytes", c.c_uint64),
        ("wait_ns", c.c_uint64),
        ("transfer_ns", c.c_uint64),
        ("blocks", c.c_uint32),
        ("segments", c.c_uint32),
        ("transport", c.c_char * 8),
        ("transfer_id", c.c_char * (TRANSFER_ID_MAX + 8)),
        ("reason", c.c_char * 320),
    ]


STRUCTS: tuple[type[c.Structure], ...] = (Region, Blocks, OfferRequest, PartialOffer, LoadRequest, Completion)
