// Package wire has the messages between agents on the control plane, as MessagePack.
// Every array and string has a limit, so that a peer's claim of a size never allocates
// more. Fields may be added. Version is raised only when an older agent would
// misunderstand a message.
package wire

//go:generate go tool msgp -o wire_gen.go -tests=false -io=false

//msgp:limit arrays:65536 maps:32

// Version is compared at Hello; agents of unequal versions refuse each other.
const Version = 1

// MaxMessage is the longest encoded message that is read, in bytes.
const MaxMessage = 8 << 20

// Kind says which field of a Request is set.
type Kind uint8

// The kinds of requests.
const (
	KindHello  Kind = 1 // D → P, once for each peer: D's description
	KindLoad   Kind = 2 // D → P: put this transfer into these blocks
	KindRenew  Kind = 3 // D → P: keep these transfers; without any, both ways: are you there?
	KindFinish Kind = 4 // both ways: these transfers have ended at the sender
	KindSignal Kind = 5 // both ways: a message between the two ends of a transport
	KindJoin   Kind = 6 // rank → its engine's first rank, whose server it uses: register the rank, again and again
)

// Request is one message that is answered by a Reply.
type Request struct {
	Kind     Kind     `msg:"k"`
	From     string   `msg:"-"` // AgentID of the sender, as its connection has proved it: no message says it
	Account  string   `msg:"-"` // whom the sender's places count under, see core.Account: no message says it
	Hello    *Agent   `msg:"h,omitempty"`
	Load     *Load    `msg:"l,omitempty"`
	Renew    *Renew   `msg:"r,omitempty"`
	Finishes []Finish `msg:"x,omitempty,limit=4096"`
	Signal   *Signal  `msg:"sg,omitempty"`
	Join     *Join    `msg:"j,omitempty"`
}

// Join keeps the registration of a rank at a server that is not its own.
type Join struct {
	Agent *Agent `msg:"a"`
	New   bool   `msg:"n,omitempty"` // the agent is new, and takes the rank over
	Leave bool   `msg:"l,omitempty"` // the agent goes
	Since int64  `msg:"s"`           // orders the agents that register one rank; the answer may raise it
}

// MaxSignal is the longest Data of a Signal and Signal of a Reply, in bytes.
const MaxSignal = 4 << 20

// Signal is a message between two ends of a transport whose content is the
// transport's own. It is sent only where both agents have that transport.
type Signal struct {
	Transport string `msg:"tr,limit=16"`
	Data      []byte `msg:"d,limit=4194304"`
}

// Agent describes an agent: a prefill rank's entry in the registry, and a
// decode rank's Hello.
type Agent struct {
	Version     int        `msg:"v"`
	ID          string     `msg:"id,limit=64"`
	EngineID    string     `msg:"e,limit=256"`
	DPRank      int        `msg:"dp"`
	TPRank      int        `msg:"tp"`
	PPRank      int        `msg:"pp"`
	TPSize      int        `msg:"tps,omitempty"` // of its engine; 0 means 1
	PPSize      int        `msg:"pps,omitempty"`
	DPSize      int        `msg:"dps,omitempty"` // engines that the first ranks' server has, one for each dp rank; 0 means 1
	Joined      bool       `msg:"j,omitempty"`   // the server where it is registered is another process's
	Model       string     `msg:"m,limit=512"`
	Fingerprint string     `msg:"mf,omitempty,limit=64"` // of the model's weights
	DType       string     `msg:"dt,limit=64"`
	BlockTokens int        `msg:"bt"`
	Endpoints   []Endpoint `msg:"ep,limit=16"`
	Shapes      []Shape    `msg:"s,limit=65536"`
	Lacks       []Lack     `msg:"lk,omitempty,limit=16"`
	MustMatch   []Fact     `msg:"mm,omitempty,limit=16"`
	RouteInfo   []byte     `msg:"ri,omitempty,limit=4096"` // a JSON object, see MaxRouteInfo
	Host        string     `msg:"ho,omitempty,limit=64"`   // the host's boot id, which nobody proves: it decides what is worth a word in the log
}

// MaxRouteInfo is the longest RouteInfo of an Agent, in bytes. GET /route of the
// bootstrap port shows it beside the engine's sizes.
const MaxRouteInfo = 4096

// Fact is something of an engine that its peers must have too, such as its
// attention backend.
//
//msgp:tuple Fact
type Fact struct {
	Name  string `msg:",limit=64"`
	Value string `msg:",limit=256"`
}

// Endpoint is where one transport of an agent is reached.
type Endpoint struct {
	Transport string `msg:"t,limit=16"`
	Address   string `msg:"a,limit=512"`
	Encrypt   string `msg:"e,omitempty,limit=8"` // whether what goes this way is encrypted: one of the words below; "" of an agent that knows none
}

// The words of an Endpoint's Encrypt. If one side must, the other may not say never.
const (
	EncryptMay   = "may"
	EncryptMust  = "must"
	EncryptNever = "never"
)

// Lack says why an agent has not got a transport, for the log and the errors of
// peers that would take it.
type Lack struct {
	Transport string `msg:"t,limit=16"`
	Reason    string `msg:"r,limit=512"`
}

// Shape is kv.Shape.
//
//msgp:tuple Shape
type Shape struct {
	Name                                 string `msg:",limit=256"`
	BlockStride, BlockBytes              uint64
	NumBlocks, Group                     uint32
	Tokens, Heads, FirstHead, TotalHeads uint32 // 0: a block is opaque
	TokenStride, HeadStride              uint64
	IndexKind                            uint32 // kv.IndexKind
}

// Load asks P to write a transfer into D's blocks.
type Load struct {
	TransferID string   `msg:"t,limit=144"` // of a part: core/machine.PartID
	Transport  string   `msg:"tr,limit=16"`
	Grant      []byte   `msg:"g,limit=4096"`
	Groups     []Blocks `msg:"b,limit=16"`
	Tokens     []uint32 `msg:"tk,omitempty,limit=16"`    // of the prompt, per group; none: all that the blocks have room for
	Regions    []uint32 `msg:"rg,omitempty,limit=65536"` // of a part: D's regions that it is of; none means all
	Prompt     uint64   `msg:"p,omitempty"`              // fingerprint of what it is to be the cache of; 0: not said
	LeaseMS    int64    `msg:"ls"`
}

// Blocks are D's blocks of one KV cache group.
//
//msgp:tuple Blocks
type Blocks struct {
	First uint32 // position in the prompt of the first block
	IDs   BlockIDs
}

// Renew keeps the leases of transfers that D has asked for, and of those that
// it will ask for when it has blocks.
type Renew struct {
	Loads  []string `msg:"t,limit=1024"`
	Claims []string `msg:"c,limit=1024"`
}

// Finish ends a transfer: a Code of 0 says that all bytes have arrived. With Restart
// the transfer goes on: P has taken back what it had begun to send.
type Finish struct {
	TransferID string `msg:"t,limit=144"`
	Code       int    `msg:"c"`
	Reason     string `msg:"r,limit=1024"`
	Restart    string `msg:"rs,omitempty,limit=16"` // digest of the grant whose load D is to make anew
}

// Again says why a refused request was not handled, and is to be made once more. Such a
// refusal ends no transfer.
type Again uint8

// The reasons to ask again.
const (
	AgainAfterHello Again = 1 // the sender is not known here: it must say hello first
	AgainLater      Again = 2 // there is too much to do at this moment
)

// Reply answers a Request. A Code other than 0 is a refusal.
type Reply struct {
	Code     int      `msg:"c"`
	Again    Again    `msg:"n,omitempty"` // counts beside a Code only
	Reason   string   `msg:"r,limit=1024"`
	Tickets  []Ticket `msg:"ts,omitempty,limit=16"`      // of a Hello: with each D connects one of its transports to P's
	AgeMS    int64    `msg:"ag,omitempty"`               // of a Hello: for how long P's agent has been open, rounded up; 0 is unknown
	Since    int64    `msg:"sn,omitempty"`               // of a Join: its Since from now on
	Statuses []uint8  `msg:"s,limit=2048"`               // of a Renew: core.Status per load, then per claim
	Ends     []End    `msg:"e,omitempty,limit=2048"`     // of those that have ended: why
	Signal   []byte   `msg:"sg,omitempty,limit=4194304"` // the answer to a Signal
}

// Ticket is shown by D's transport of that name when it connects to P's.
//
//msgp:tuple Ticket
type Ticket struct {
	Transport string `msg:",limit=16"`
	Ticket    []byte `msg:",limit=64"`
}

// End is how a transfer of a Renew ended on P's side.
//
//msgp:tuple End
type End struct {
	Index  uint32 // into Statuses
	Code   int
	Reason string `msg:",limit=1024"`
}
