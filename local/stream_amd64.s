#include "textflag.h"

// func stream(dst, src unsafe.Pointer, n uintptr)
//
// The first 16 bytes and the last 64 go by ordinary stores, which may be unaligned and overlap the others.
TEXT ·stream(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), BX
	MOVOU (SI), X0
	MOVOU X0, (DI)
	MOVQ DI, CX
	NEGQ CX
	ANDQ $15, CX // bytes to the next multiple of 16
	ADDQ CX, DI
	ADDQ CX, SI
	SUBQ CX, BX
	MOVQ BX, CX
	SHRQ $6, CX

loop:
	MOVOU (SI), X0
	MOVOU 16(SI), X1
	MOVOU 32(SI), X2
	MOVOU 48(SI), X3
	MOVNTO X0, (DI)
	MOVNTO X1, 16(DI)
	MOVNTO X2, 32(DI)
	MOVNTO X3, 48(DI)
	ADDQ $64, SI
	ADDQ $64, DI
	DECQ CX
	JNZ loop
	ANDQ $63, BX
	JZ done
	ADDQ BX, SI
	ADDQ BX, DI
	MOVOU -64(SI), X0
	MOVOU -48(SI), X1
	MOVOU -32(SI), X2
	MOVOU -16(SI), X3
	MOVOU X0, -64(DI)
	MOVOU X1, -48(DI)
	MOVOU X2, -32(DI)
	MOVOU X3, -16(DI)

done:
	SFENCE
	RET
