package plan

// Traffic counts what has gone through a ServicePort so far, over all its frontends. The counters only grow, except that they may begin
// at zero again. One that the backend does not have is NotCounted.
type Traffic struct {
	Key                  Key
	Connections          int64
	PacketsIn, BytesIn   int64 // from clients to endpoints
	PacketsOut, BytesOut int64 // from endpoints to clients
}

// NotCounted stands for a counter that a backend does not have.
const NotCounted = -1
