"""`security`: certificates, and who may reach the yard."""

from __future__ import annotations

from pydantic import Field

from shardyard.config.settings.values import AUTO, Folder, FolderOrNone, Section


class SecuritySettings(Section):
    tls: bool = Field(
        default=True,
        description="Connections of the yard use TLS, with certificates on both sides. false: whoever reaches a port"
        " can do everything; for debugging on one machine. All processes of a yard have the same value.",
    )
    identity: Folder = Field(
        default=AUTO,
        description="The folder with the certificate of this process: tls.crt, tls.key and ca.crt. auto: what the yard"
        " or `shardyard join` has made for its role on this machine.",
    )
    authority: Folder = Field(
        default=AUTO,
        description="The folder of the key with which the coordinator signs the certificates of its yard: ca.key and"
        " ca.crt. They are made if there are none. auto: identity/authority, in the state folder.",
    )
    invitation: FolderOrNone = Field(
        default="",
        description="A file with an invitation to the yard. A process that has no certificate yet gets it with this, as"
        " `shardyard join` does. Empty: none.",
    )
    invitations: FolderOrNone = Field(
        default="",
        description="A folder in which the coordinator leaves invitations, in a file `invitation` in each folder below"
        " it that is named as a role (server, agent, worker, reader, viewer). Processes that share it name the file in"
        " security.invitation. Empty: none.",
    )
    insecure_network: bool = Field(
        default=False,
        description="Allows services to listen on addresses other than loopback without TLS. Whoever reaches such a"
        " port can run programs on the machine.",
    )
