"""Which process is which, and what it may do: certificates, the yard's authority, the roles.

A yard has an authority, a key that signs the certificates of its members. Every gRPC connection of the yard uses TLS
with certificates on both sides, and the door of each service decides by the caller's certificate.

Read `identity` (who a certificate is for), `authority` (makes certificates), `credentials` (a member's own, in a
folder), `local` (where the processes of this machine find theirs), `issuing` (makes these), `invitations` (how a
process of another machine gets one), then `roles` (which role may call which method) and `door` (looks at each call).
"""
