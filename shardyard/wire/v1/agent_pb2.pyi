from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LaunchRequest(_message.Message):
    __slots__ = ("script", "arguments", "working_directory", "environment", "workers", "restarts_max", "restarts_window_ms", "key", "unattended", "owner")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    WORKING_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_MAX_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    UNATTENDED_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    script: str
    arguments: _containers.RepeatedScalarFieldContainer[str]
    working_directory: str
    environment: _containers.ScalarMap[str, str]
    workers: int
    restarts_max: int
    restarts_window_ms: int
    key: int
    unattended: bool
    owner: str
    def __init__(self, script: _Optional[str] = ..., arguments: _Optional[_Iterable[str]] = ..., working_directory: _Optional[str] = ..., environment: _Optional[_Mapping[str, str]] = ..., workers: _Optional[int] = ..., restarts_max: _Optional[int] = ..., restarts_window_ms: _Optional[int] = ..., key: _Optional[int] = ..., unattended: bool = ..., owner: _Optional[str] = ...) -> None: ...

class LaunchReply(_message.Message):
    __slots__ = ("launch", "workers")
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    launch: int
    workers: int
    def __init__(self, launch: _Optional[int] = ..., workers: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("launch", "next_event")
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_EVENT_FIELD_NUMBER: _ClassVar[int]
    launch: int
    next_event: int
    def __init__(self, launch: _Optional[int] = ..., next_event: _Optional[int] = ...) -> None: ...

class ProcessStarted(_message.Message):
    __slots__ = ("local_index", "pid", "restarts")
    LOCAL_INDEX_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    local_index: int
    pid: int
    restarts: int
    def __init__(self, local_index: _Optional[int] = ..., pid: _Optional[int] = ..., restarts: _Optional[int] = ...) -> None: ...

class ProcessOutput(_message.Message):
    __slots__ = ("local_index", "standard_error", "line", "time_s", "by_agent")
    LOCAL_INDEX_FIELD_NUMBER: _ClassVar[int]
    STANDARD_ERROR_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    BY_AGENT_FIELD_NUMBER: _ClassVar[int]
    local_index: int
    standard_error: bool
    line: str
    time_s: float
    by_agent: bool
    def __init__(self, local_index: _Optional[int] = ..., standard_error: bool = ..., line: _Optional[str] = ..., time_s: _Optional[float] = ..., by_agent: bool = ...) -> None: ...

class ProcessExited(_message.Message):
    __slots__ = ("local_index", "pid", "exit_code", "will_restart", "ending")
    LOCAL_INDEX_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    WILL_RESTART_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    local_index: int
    pid: int
    exit_code: int
    will_restart: bool
    ending: str
    def __init__(self, local_index: _Optional[int] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., will_restart: bool = ..., ending: _Optional[str] = ...) -> None: ...

class LaunchEnded(_message.Message):
    __slots__ = ("exit_code", "first_error_index", "first_error", "stopped", "agent_leaves")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_ERROR_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_ERROR_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    AGENT_LEAVES_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    first_error_index: int
    first_error: str
    stopped: bool
    agent_leaves: bool
    def __init__(self, exit_code: _Optional[int] = ..., first_error_index: _Optional[int] = ..., first_error: _Optional[str] = ..., stopped: bool = ..., agent_leaves: bool = ...) -> None: ...

class LaunchEvent(_message.Message):
    __slots__ = ("number", "started", "output", "exited", "ended")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    started: ProcessStarted
    output: ProcessOutput
    exited: ProcessExited
    ended: LaunchEnded
    def __init__(self, number: _Optional[int] = ..., started: _Optional[_Union[ProcessStarted, _Mapping]] = ..., output: _Optional[_Union[ProcessOutput, _Mapping]] = ..., exited: _Optional[_Union[ProcessExited, _Mapping]] = ..., ended: _Optional[_Union[LaunchEnded, _Mapping]] = ...) -> None: ...

class ReadOutputRequest(_message.Message):
    __slots__ = ("launch", "process", "tail", "follow")
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    launch: int
    process: int
    tail: int
    follow: bool
    def __init__(self, launch: _Optional[int] = ..., process: _Optional[int] = ..., tail: _Optional[int] = ..., follow: bool = ...) -> None: ...

class OutputLines(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[ProcessOutput]
    def __init__(self, lines: _Optional[_Iterable[_Union[ProcessOutput, _Mapping]]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("launch", "grace_ms")
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    launch: int
    grace_ms: int
    def __init__(self, launch: _Optional[int] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeAgentRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribedLaunch(_message.Message):
    __slots__ = ("launch", "script", "running", "ended", "workers", "started_s", "ended_s", "ending", "pids", "next_event")
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_EVENT_FIELD_NUMBER: _ClassVar[int]
    launch: int
    script: str
    running: int
    ended: bool
    workers: int
    started_s: float
    ended_s: float
    ending: LaunchEnded
    pids: _containers.RepeatedScalarFieldContainer[int]
    next_event: int
    def __init__(self, launch: _Optional[int] = ..., script: _Optional[str] = ..., running: _Optional[int] = ..., ended: bool = ..., workers: _Optional[int] = ..., started_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., ending: _Optional[_Union[LaunchEnded, _Mapping]] = ..., pids: _Optional[_Iterable[int]] = ..., next_event: _Optional[int] = ...) -> None: ...

class DescribeAgentReply(_message.Message):
    __slots__ = ("workers", "launches")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    workers: int
    launches: _containers.RepeatedCompositeFieldContainer[DescribedLaunch]
    def __init__(self, workers: _Optional[int] = ..., launches: _Optional[_Iterable[_Union[DescribedLaunch, _Mapping]]] = ...) -> None: ...
