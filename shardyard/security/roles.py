"""Which role may call which method: the whole table. What is not in it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from shardyard.security.identity import Role
from shardyard.wire import methods
from shardyard.wire.method import Method

_COORDINATOR, _SERVER, _AGENT = Role.COORDINATOR, Role.SERVER, Role.AGENT
_WORKER, _READER, _OPERATOR, _VIEWER, _INVITED = Role.WORKER, Role.READER, Role.OPERATOR, Role.VIEWER, Role.INVITED

MEMBERS: Final = (_SERVER, _AGENT, _WORKER)
ALL: Final = tuple(role for role in Role if role is not _INVITED)

_TABLE: Final[tuple[tuple[Method[Any, Any], tuple[Role, ...]], ...]] = (
    # the coordinator: members
    (methods.ENROL, tuple(Role)),
    (methods.INVITE, (_OPERATOR,)),
    (methods.LIST_IDENTITIES, (_OPERATOR, _VIEWER)),
    (methods.REVOKE_IDENTITY, (_OPERATOR,)),
    (methods.ROTATE_AUTHORITY, (_OPERATOR,)),
    (methods.REGISTER, MEMBERS),
    (methods.HEARTBEAT, MEMBERS),
    (methods.LEAVE, MEMBERS),
    (methods.DRAIN, (*MEMBERS, _OPERATOR)),
    (methods.REPORT_EXIT, (_AGENT,)),
    # the coordinator: jobs and their data
    (methods.JOIN_JOB, (_WORKER,)),
    (methods.REGISTER_VARIABLES, (_WORKER,)),
    (methods.COMMIT_VARIABLES, (_WORKER,)),
    (methods.OPEN_FEED, (_WORKER,)),
    (methods.LEASE_DATA, (_WORKER,)),
    (methods.CLOSE_LEASE, (_WORKER,)),
    (methods.BEGIN_BATCH, (_WORKER,)),
    (methods.REPORT_NOT_FINITE, (_WORKER,)),
    (methods.DECIDE_STEP, (_WORKER,)),
    (methods.READ_MAKE_UP, (_WORKER,)),
    (methods.JOIN_REPLICA_GROUP, (_WORKER,)),
    (methods.PUT_GROUP_KEY, (_WORKER,)),
    (methods.GET_GROUP_KEYS, (_WORKER,)),
    (methods.REPORT_PUBLISHED, (_WORKER,)),
    (methods.REBASE_SOURCE, (_WORKER,)),
    (methods.REPORT_RESIDUAL, (_WORKER,)),
    (methods.TAKE_UP_RESIDUAL, (_WORKER,)),
    (methods.TAKE_CHECKPOINT, (_WORKER, _OPERATOR)),
    (methods.STOP_JOB, (_WORKER, _OPERATOR)),
    (methods.SWITCH_CONSISTENCY, (_OPERATOR,)),
    (methods.RESTORE_CHECKPOINT, (_OPERATOR,)),
    # the coordinator: readers and people
    (methods.FOLLOW_JOB, (_WORKER, _READER)),
    (methods.REPORT_EVALUATION, (_WORKER, _READER)),
    (methods.STATUS, ALL),
    (methods.LIST_QUARANTINED, (_OPERATOR, _VIEWER)),
    (methods.READ_AUDIT, (_OPERATOR, _VIEWER)),
    # servers: orders of the coordinator
    (methods.CREATE_PARTITIONS, (_COORDINATOR,)),
    (methods.OPEN_PARTITIONS, (_COORDINATOR,)),
    (methods.SAVE_CHECKPOINT, (_COORDINATOR,)),
    (methods.FORGET_SOURCES, (_COORDINATOR,)),
    (methods.PASS_OVER, (_COORDINATOR,)),
    (methods.SET_STALENESS, (_COORDINATOR,)),
    (methods.DROP_JOB, (_COORDINATOR,)),
    (methods.FENCE, (_COORDINATOR,)),
    (methods.READ_LEDGER, (_COORDINATOR,)),
    # servers: values
    (methods.INITIALIZE, (_WORKER,)),
    (methods.INITIALIZE_OPTIMIZER, (_WORKER,)),
    (methods.PUBLISH_STATE, (_WORKER,)),
    (methods.OPEN_SOURCES, (_WORKER,)),
    (methods.PUSH, (_WORKER,)),
    (methods.PUSH_PULL, (_WORKER,)),
    (methods.ATTACH, (_WORKER,)),
    (methods.READ_OPTIMIZER, (_WORKER,)),
    (methods.PULL, (_WORKER, _READER)),
    (methods.PIN, (_WORKER, _READER)),
    (methods.UNPIN, (_WORKER, _READER)),
    (methods.LOOK_UP, (_WORKER, _READER)),
    (methods.READ_ROWS, (_WORKER, _READER)),
    (methods.DESCRIBE_SERVER, (_WORKER, _READER, _OPERATOR, _VIEWER)),
    # agents
    (methods.LAUNCH, (_OPERATOR, _AGENT)),
    (methods.STOP, (_OPERATOR,)),
    (methods.WATCH, (_OPERATOR,)),
    (methods.READ_OUTPUT, (_OPERATOR, _VIEWER)),
    (methods.DESCRIBE_AGENT, (_OPERATOR, _VIEWER)),
)

ALLOWED: Final[Mapping[str, frozenset[Role]]] = MappingProxyType(
    {method.path: frozenset(roles) for method, roles in _TABLE}
)
"""The roles that may call a method, by its path."""
